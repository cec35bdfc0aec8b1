//! Many executions, each of a seed.

use crate::bugs::Bug;
use crate::simulation::history::History;
use crate::simulation::progress;
use crate::simulation::run::execute;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Steps after the last access of a program for which an execution counts as hung, where each thread runs
/// again and again. A fault waits for room for 250 ms at most. In each of these the governor looks at all
/// programs, which takes some 4000 steps if there are a dozen.
const MOST_STEPS: usize = 2_000_000;
/// Steps after which an execution is left alone where some threads run only when others wait: there a page
/// may be paged out each time before its thread has seen it.
const ENOUGH_STEPS: usize = 50_000;
/// Changes of priority in a schedule that prefers some threads.
const PRIORITY_CHANGES: usize = 3;

/// The seed of the schedules of a history's seed. A seed's lowest bits choose what there is beside the programs (a thread
/// that helps the reclaimer, how victims are chosen), and those of its schedules whether these are fair, of which alone a
/// hang is a failure: so either comes with both.
pub fn schedules_of(seed: u64) -> u64 {
    seed ^ (seed >> 2 & 1)
}

/// How executions run, for `most` steps.
pub fn config(most: MaxSteps) -> Config {
    let mut config = Config::new();
    config.stack_size = 1 << 18;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = most;
    config.silence_warnings = true;
    config
}

/// Executes a scenario in schedules that `seed` chooses, with a bug of the past if one is given. After `most_steps`, an
/// execution counts as hung.
pub(crate) fn scenario(
    seed: u64,
    schedules: usize,
    (most_steps, bug): (usize, Option<Bug>),
    execute: impl Fn() + Send + Sync + 'static,
) {
    Bug::put_back(bug);
    progress::watch(false);
    let scheduler = RandomScheduler::new_from_seed(seed, schedules);
    Runner::new(scheduler, config(MaxSteps::FailAfter(most_steps))).run(execute);
}

/// Executes a history in `schedules` schedules, which `seed` chooses.
///
/// # Panics
/// If a page does not hold what it must, a program does not end, or something is left.
pub fn run(history: &History, seed: u64, schedules: usize) {
    run_for(history, seed, schedules, MOST_STEPS);
}

fn run_for(history: &History, seed: u64, schedules: usize, most_steps: usize) {
    let once = history.clone();
    let is_fair = seed.is_multiple_of(2);
    progress::watch(is_fair);
    if is_fair {
        let scheduler = RandomScheduler::new_from_seed(seed, schedules);
        Runner::new(scheduler, config(MaxSteps::FailAfter(most_steps))).run(move || execute(&once));
    } else {
        let scheduler = PctScheduler::new_from_seed(seed, PRIORITY_CHANGES, schedules);
        Runner::new(scheduler, config(MaxSteps::ContinueAfter(ENOUGH_STEPS)))
            .run(move || execute(&once));
    }
}

/// The same; the message of the panic if it fails.
pub fn try_run(history: &History, seed: u64, schedules: usize) -> Result<(), String> {
    try_for(history, seed, schedules, MOST_STEPS)
}

/// The same, where an execution counts as hung after `most_steps` without an access.
pub fn try_for(
    history: &History,
    seed: u64,
    schedules: usize,
    most_steps: usize,
) -> Result<(), String> {
    let execute = || run_for(history, seed, schedules, most_steps);
    catch_unwind(AssertUnwindSafe(execute)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        text.unwrap_or_else(|| "a panic".to_owned())
    })
}

/// A history that fails, with its schedules.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The seed of the schedules.
    pub seed: u64,
    /// What the programs did.
    pub history: History,
    /// Number of schedules of which one fails.
    pub schedules: usize,
    /// What went wrong.
    pub why: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure {
            seed,
            history,
            schedules,
            why,
        } = self;
        write!(
            out,
            "{why}\n{} steps, in one of {schedules} schedules of seed {seed}:\n{history}",
            history.steps()
        )
    }
}

/// Schedules of each history.
const SCHEDULES: usize = 3;

/// Executes the history of a seed, with a bug of the past if one is given: in the schedules of that seed then, so that it is
/// found where it was.
pub fn check(seed: u64, bug: Option<Bug>) -> Result<(), Failure> {
    let schedules = if bug.is_some() {
        seed
    } else {
        schedules_of(seed)
    };
    check_in(seed, schedules, bug)
}

/// Executes the history of a seed in the schedules of another.
pub fn check_in(seed: u64, schedules: u64, bug: Option<Bug>) -> Result<(), Failure> {
    Bug::put_back(bug);
    let history = History::of_seed(seed);
    try_run(&history, schedules, SCHEDULES).map_err(|why| Failure {
        seed: schedules,
        history,
        schedules: SCHEDULES,
        why,
    })
}

/// The shortest history found within a time that still fails, if the panics of executions can be caught.
pub fn shorten(failure: Failure, bug: Option<Bug>, patience: Duration) -> Failure {
    /// Schedules of each shorter history: fewer of them fail.
    const MORE_SCHEDULES: usize = 40;
    Bug::put_back(bug);
    let began = Instant::now();
    let mut shortest = failure;
    'again: loop {
        for history in shortest.history.shorter() {
            if began.elapsed() >= patience {
                return shortest;
            }
            for seed in [shortest.seed, shortest.seed ^ 1] {
                if let Err(why) = try_run(&history, seed, MORE_SCHEDULES) {
                    shortest = Failure {
                        seed,
                        history,
                        schedules: MORE_SCHEDULES,
                        why,
                    };
                    continue 'again;
                }
            }
        }
        return shortest;
    }
}
