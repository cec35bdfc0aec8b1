//! A child that has lost pages, as its parent was gone before they were read, and forks before it is killed.

use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::begin;
use crate::simulation::world::{World, named};
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
    let (world, memfold) = begin(&history);
    let memory = Arc::new(Memory::new(world.next_thread() as i32));
    world.start(&memory);
    let (beside, parent) = (world.clone(), memory.clone());
    let program = named("program", move || fork_twice(&beside, &parent));
    program.join().expect("a program");
    world.exit(&memory);
    drop(memory);
    memfold.join(&world);
    world.finish();
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
    loop {
        if let Some(space) = world.space_of(&child) {
            return (child, space);
        }
        time::yield_now();
    }
}
