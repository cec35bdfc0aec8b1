//! Two programs over the limit, while a thread that reads the messages of one of them holds its gate again and
//! again, for as long as the other one makes no progress. It comes in when another thread has left the gate,
//! before that thread can enter it again.

use crate::bugs::Bug;
use crate::simulation::history::{AREA_PAGES, History, places};
use crate::simulation::model::memory::Memory;
use crate::simulation::run::begin;
use crate::simulation::world::{World, named};
use crate::simulation::{explore, time};
use shuttle::rand::Rng;
use shuttle::thread::JoinHandle;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Steps after which an execution counts as hung.
const MOST_STEPS: usize = 5_000_000;
/// Writes of the program whose gate is not held; the other one writes for as long.
const WRITES: u64 = 200;
/// Writes of the other program for which the gate is held, and looks at them before it counts as held up. A
/// look lets another thread run.
const WRITES_PER_HOLD: u64 = 3;
const LOOKS: usize = 100_000;
/// The reader comes when the gate was left fewer times than this after a fault began to wait for room.
const MOST_LEFT: u32 = 8;
/// Most looks between two holds.
const LONGEST_PAUSE: u32 = 1000;

/// What each program has of memory, and the limit for both: each of them faults again and again.
const PAGES: u64 = AREA_PAGES;
const LIMIT: u64 = PAGES - 2;

/// Executes it in schedules that `seed` chooses, with a bug of the past if one is given.
///
/// # Panics
/// If a program waits for the other one's gate.
pub fn run(seed: u64, schedules: usize, bug: Option<Bug>) {
    explore::scenario(seed, schedules, (MOST_STEPS, bug), move || execute(seed));
}

fn execute(seed: u64) {
    // Of its two handlers, the fault of a program whose gate is held may keep one.
    let history = History::of_scenario(seed, LIMIT);
    let (world, memfold) = begin(&history);
    let programs = [0, 1].map(|_| Program::start(&world));
    let [held, other] = &programs;
    let until = other.written.clone();
    let threads = [
        held.run(move |_| until.load(Ordering::Relaxed) >= WRITES),
        other.run(|written| written >= WRITES),
    ];
    let space = world.space_of(&held.memory).expect("an address space");
    while other.written() < WRITES {
        let gate = space.channel.gate();
        pause(|| world.has_deferred());
        gate.enter_when_left(shuttle::rand::thread_rng().gen_range(1..MOST_LEFT));
        pause(|| gate.has_come());
        let enough = (other.written() + WRITES_PER_HOLD).min(WRITES);
        let progresses = (0..LOOKS).any(|_| {
            time::yield_now();
            !gate.has_come() || other.written() >= enough
        });
        assert!(progresses, "a program waits for another one's gate");
        gate.leave_again();
    }
    drop(space);
    for thread in threads {
        thread.join().expect("a program");
    }
    programs
        .iter()
        .for_each(|program| world.exit(&program.memory));
    drop(programs);
    memfold.join(&world);
    world.finish();
}

/// Lets others run until something is so, not for long.
fn pause(is_over: impl Fn() -> bool) {
    for _ in 0..LONGEST_PAUSE {
        if is_over() {
            break;
        }
        time::yield_now();
    }
}

/// A program that writes to its pages in turn.
struct Program {
    memory: Arc<Memory>,
    thread: u32,
    written: Arc<AtomicU64>,
}

impl Program {
    fn start(world: &World) -> Program {
        let memory = Arc::new(Memory::new(world.next_thread() as i32));
        world.start(&memory);
        Program {
            memory,
            thread: world.next_thread(),
            written: Arc::default(),
        }
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    fn run(&self, is_over: impl Fn(u64) -> bool + Send + 'static) -> JoinHandle<()> {
        let (memory, written, thread) = (self.memory.clone(), self.written.clone(), self.thread);
        named("program", move || {
            let area = memory.map(places(false), PAGES).expect("a free place");
            for number in (0..).take_while(|number| !is_over(*number)) {
                let page = area.start.plus(number % PAGES);
                let result = memory.write(page, thread, number + 1);
                memory.must_be_mapped(result);
                written.fetch_add(1, Ordering::Relaxed);
                time::yield_now();
            }
        })
    }
}
