//! A child that has lost pages, as its parent was gone before they were read, and forks before it is killed.

use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::execute_alone;
use crate::simulation::world::World;
use crate::simulation::{explore, time};
use crate::supervised::space::AddressSpace;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 1_000_000;

/// Executes it in schedules that `seed` chooses.
///
/// # Panics
/// If the child's child is not to be killed.
pub fn run(seed: u64, schedules: usize) {
    explore::scenario(seed, schedules, (MOST_STEPS, None), move || execute(seed));
}

fn execute(seed: u64) {
    let history = History {
        handlers: 1,
        ..History::of_scenario(seed, AREA_PAGES)
    };
    execute_alone(&history, fork_twice);
}

fn fork_twice(world: &World, memory: &Arc<Memory>) {
    let area = memory.map(places(false), AREA_PAGES).expect("a free place");
    // Else the child's fork is not reported.
    while !memory.state().is_registered(area) {
        time::yield_now();
    }
    let (child, space) = fork(world, memory);
    space.fork.lost.store(true, Ordering::Relaxed);
    let (its_child, space) = fork(world, &child);
    assert!(
        space.fork.lost.load(Ordering::Relaxed),
        "a child's child would read zeros"
    );
    world.exit(&its_child);
    world.exit(&child);
}

/// Forks, and waits until the child is known.
fn fork(world: &World, memory: &Arc<Memory>) -> (Arc<Memory>, Arc<AddressSpace>) {
    let child = memory.fork(world.next_process());
    let space = world.await_space(&child);
    (child, space)
}
