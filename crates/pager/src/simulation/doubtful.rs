//! A program that unmaps memory at each look at what is kept from its children by mistake: what is elsewhere does not stay in
//! doubt.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::execute_alone;
use crate::simulation::world::World;
use crate::simulation::{explore, time};
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use std::sync::Arc;

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 1_000_000;

/// Executes it in schedules that `seed` chooses.
///
/// # Panics
/// If it stays in doubt.
pub fn run(seed: u64, schedules: usize) {
    explore::scenario(seed, schedules, (MOST_STEPS, None), move || execute(seed));
}

fn execute(seed: u64) {
    let history = History {
        prepared: true,
        ..History::of_scenario(seed, 4 * AREA_PAGES)
    };
    execute_alone(&history, unmap_at_each_look);
}

fn unmap_at_each_look(world: &World, memory: &Arc<Memory>) {
    let map = || memory.map(places(false), AREA_PAGES).expect("a free place");
    let (area, others) = (map(), map());
    let space = world.await_space(memory);
    for range in [area, others] {
        while lock(&space.managed).covered(range) != [range] {
            time::yield_now();
        }
    }
    memory.state().looks = Some((0, 0));
    lock(&space.prepared.doubtful).add(area);
    for page in others.start.0..others.end.0 {
        while is_in_doubt(&space) && !is_looked(memory) {
            time::yield_now();
        }
        let page = PageRange::around(VirtualPage(page), 1);
        memory.unmap(page);
        // Time passes faster than work is done: the look would not wait for the reader of the event.
        while !lock(&space.managed).covered(page).is_empty() || space.try_shared().is_none() {
            time::yield_now();
        }
        if let Some((_, answered)) = &mut memory.state().looks {
            *answered += 1;
        }
    }
    memory.state().looks = None;
    assert!(!is_in_doubt(&space), "it stays in doubt");
}

fn is_in_doubt(space: &AddressSpace) -> bool {
    !lock(&space.prepared.doubtful).ranges().ranges().is_empty()
}

/// Whether a look waits.
fn is_looked(memory: &Memory) -> bool {
    let looks = memory.state().looks;
    looks.is_some_and(|(begun, answered)| begun > answered)
}
