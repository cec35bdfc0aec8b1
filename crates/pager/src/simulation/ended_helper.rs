//! A program whose helper is killed in the gate, before it has carried a run off, while another process uses its memory: the
//! child of a `vfork` whose parent is killed. What is out comes back, and messages are read.

use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::begin;
use crate::simulation::world::{World, named};
use crate::simulation::{explore, time};
use shuttle::rand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 1_000_000;
/// Writes after the helper has ended.
const WRITES: u64 = 3 * PAGES;
/// Writes before it at most: it may have nothing to do.
const MOST_WRITES: u64 = 20 * PAGES;
/// Runs that the helper carries off before.
const MOST_RUNS: u32 = 6;

const PAGES: u64 = AREA_PAGES;
const LIMIT: u64 = PAGES / 2;

/// Executes it in schedules that `seed` chooses. Returns in how many of them the helper ended.
///
/// # Panics
/// If a page is lost, or the program waits for good.
pub fn run(seed: u64, schedules: usize) -> usize {
    let ended = Arc::new(AtomicUsize::new(0));
    let count = ended.clone();
    explore::scenario(seed, schedules, (MOST_STEPS, None), move || {
        let has_ended = execute(seed);
        count.fetch_add(usize::from(has_ended), Ordering::Relaxed);
    });
    ended.load(Ordering::Relaxed)
}

fn execute(seed: u64) -> bool {
    let history = History {
        carries: true,
        ..History::of_scenario(seed, LIMIT)
    };
    let (world, memfold) = begin(&history);
    let memory = Arc::new(Memory::new(world.next_thread() as i32));
    memory.state().carries_left = Some(shuttle::rand::thread_rng().gen_range(0..MOST_RUNS));
    world.start(&memory);
    let (beside, survivor) = (world.clone(), memory.clone());
    let program = named("program", move || outlive(&beside, &survivor));
    program.join().expect("a program");
    let has_ended = memory.state().has_helper_ended;
    world.exit(&memory);
    drop(memory);
    memfold.join(&world);
    world.finish();
    has_ended
}

/// What the program does, and the process that outlives it.
fn outlive(world: &World, memory: &Arc<Memory>) {
    let thread = world.next_thread();
    let area = memory.map(places(false), PAGES).expect("a free place");
    let write = |number: u64| {
        let page = area.start.plus(number % PAGES);
        let result = memory.write(page, thread, number + 1);
        memory.must_be_mapped(result);
        time::yield_now();
    };
    let ended = (0..MOST_WRITES).find(|number| {
        write(*number);
        memory.state().has_helper_ended
    });
    // As the acceptor does when the helper's socket closes.
    if let Some(space) = world.space_of(memory).filter(|_| ended.is_some()) {
        space.life.detach();
        space.leave();
    }
    let next = ended.unwrap_or(MOST_WRITES);
    for number in next..next + WRITES {
        write(number);
        let other = memory.map(places(false), 1).expect("a free place");
        memory.unmap(other);
    }
}
