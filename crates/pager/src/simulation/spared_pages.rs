//! A program that goes through more memory than it may keep, and uses a part of it all the time: what it uses stays, where
//! the kernel tells which pages were accessed.

use crate::page::VirtualPage;
use crate::simulation::explore;
use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::execute_alone;
use crate::simulation::time;
use crate::simulation::world::World;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 4_000_000;
/// Pages that are used all the time, of those of the area.
const HOT: u64 = 3;
const ROUNDS: u64 = 12;

/// Executes it in schedules that `seed` chooses. Returns how often a page that is used all the time was out.
pub fn run(seed: u64, schedules: usize, tracked: bool) -> u64 {
    let misses = Arc::new(AtomicU64::new(0));
    let counted = misses.clone();
    explore::scenario(seed, schedules, (MOST_STEPS, None), move || {
        execute(seed, tracked, &counted);
    });
    misses.load(Ordering::Relaxed)
}

fn execute(seed: u64, tracked: bool, misses: &Arc<AtomicU64>) {
    let history = History {
        handlers: 1,
        tracked,
        ..History::of_scenario(seed, AREA_PAGES / 2 + HOT)
    };
    let misses = misses.clone();
    execute_alone(&history, move |world, memory| {
        misses.fetch_add(go_through(world, memory), Ordering::Relaxed);
    });
}

fn go_through(world: &World, memory: &Arc<Memory>) -> u64 {
    const AREAS: usize = 4;
    let thread = world.next_thread();
    let areas = (0..AREAS).map(|_| memory.map(places(false), AREA_PAGES).expect("a free place"));
    let pages: Vec<VirtualPage> = areas
        .flat_map(|area| (0..area.pages()).map(move |page| area.start.plus(page)))
        .collect();
    let (hot, cold) = pages.split_at(HOT as usize);
    for page in &pages {
        memory.must_be_mapped(memory.write(*page, thread, page.0));
        // Else the reclaimer has no turn, and nothing is managed.
        time::yield_now();
    }
    let mut misses = 0;
    for _ in 0..ROUNDS {
        for page in cold {
            for hot in hot {
                let is_out = memory.state().pages[hot].frame.is_none();
                misses += u64::from(is_out);
                memory.must_be_mapped(memory.read(*hot, thread));
            }
            memory.must_be_mapped(memory.read(*page, thread));
            time::yield_now();
        }
    }
    misses
}
