//! A program that moves memory all the time, where pages are carried off and none is: what is noted of moves for runs in
//! flight does not grow.

use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::execute_alone;
use crate::simulation::world::World;
use crate::simulation::{explore, time};
use crate::sync::lock;
use std::sync::Arc;
use std::time::Duration;

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 1_000_000;
const MOVES: usize = 10;

/// Executes it in schedules that `seed` chooses.
///
/// # Panics
/// If anything is noted.
pub fn run(seed: u64, schedules: usize) {
    explore::scenario(seed, schedules, (MOST_STEPS, None), move || execute(seed));
}

fn execute(seed: u64) {
    let history = History {
        carries: true,
        ..History::of_scenario(seed, 10 * AREA_PAGES)
    };
    execute_alone(&history, move_freed);
}

fn move_freed(world: &World, memory: &Arc<Memory>) {
    let thread = world.next_thread();
    let mut area = memory.map(places(false), AREA_PAGES).expect("a free place");
    let space = world.await_space(memory);
    while lock(&space.managed).covered(area) != [area] {
        time::yield_now();
    }
    for number in 0..MOVES {
        let result = memory.write(area.start, thread, number as u64 + 1);
        memory.must_be_mapped(result);
        memory.drop_pages(area).expect("it is mapped");
        let to = memory.remap_to_free(area, places(false), false);
        area = area.moved(area.start, to.expect("a free place"));
    }
    // The last event may be read and not applied.
    drop(space.shared_within(Duration::from_secs(1)));
    let port = lock(&space.helper_port);
    assert!(port.batch.is_none(), "there is room for all of it");
    assert!(port.overrun.removed_moved.ranges().is_empty(), "it grows");
}
