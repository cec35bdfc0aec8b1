//! The pager's core under a simulated kernel, for as long as one likes.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use memfold_simulation::{
    bugs::Bug,
    simulation::{
        explore::{Failure, check, shorten},
        trace,
    },
};

use crate::{
    Options,
    report::{Report, Row},
};

/// Longest search for a shorter history that fails, too.
const PATIENCE: Duration = Duration::from_secs(60);

thread_local! {
    /// The seed of the history that this thread executes.
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// Executes histories until the time is over or one fails.
pub fn run(options: &Options) -> Result<Report> {
    let bug = options.value("bug").map(bug_of).transpose()?;
    let first = options.number("seed", 0)? as u64;
    if options.has("trace") {
        // Panics are shown, with `RUST_BACKTRACE=1` where they came from.
        trace::set(true);
        let failed = check(first, bug).err();
        trace::set(false);
        return match failed {
            Some(failure) => bail!("{failure}"),
            None => Ok(Report::new("simulate")),
        };
    }
    name_the_seed_of_panics();
    let minutes = options.value("minutes").unwrap_or("1");
    let time = minutes.parse().ok().map(|minutes: f64| minutes * 60.0);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.with_context(|| format!("--minutes takes a number, not {minutes:?}"))?;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let search = Search {
        next: AtomicU64::new(first),
        done: AtomicU64::new(0),
        over: AtomicBool::new(false),
        failure: Mutex::default(),
        bug,
    };
    let threads = options.number("threads", cpus)?.max(1);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| search.execute());
        }
        search.watch(began, time);
    });
    let histories = search.done.load(Ordering::Relaxed);
    let failure = search.failure.into_inner();
    if let Some(failure) = failure.unwrap_or_else(PoisonError::into_inner) {
        let seed = failure.seed;
        let shortest = shorten(failure, bug, PATIENCE);
        bail!(
            "seed {seed} fails, after {histories} others; the shortest history found that fails: {shortest}\
             (step by step: --seed {seed} --trace)"
        );
    }
    let mut report = Report::new("simulate");
    report.add(
        Row::new()
            .with("histories", histories)
            .with("first_seed", first)
            .with("seconds", began.elapsed().as_secs())
            .with("threads", threads),
    );
    Ok(report)
}

fn bug_of(name: &str) -> Result<Bug> {
    let bugs: Vec<Bug> = Bug::ALL.into_iter().chain(Bug::RARE).collect();
    let named = |bug: &&Bug| format!("{bug:?}") == name;
    let found = bugs.iter().find(named).copied();
    found.with_context(|| format!("--bug takes one of {bugs:?}, not {name:?}"))
}

/// A panic that ends the process, as in a release build, still says which seed it was.
fn name_the_seed_of_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if cfg!(panic = "abort") {
            let seed = SEED.get();
            eprintln!(
                "memfold-lab: seed {seed}: {panic}\n(a build without --release finds a shorter history)"
            );
        }
    }));
}

struct Search {
    next: AtomicU64,
    done: AtomicU64,
    over: AtomicBool,
    failure: Mutex<Option<Failure>>,
    bug: Option<Bug>,
}

impl Search {
    /// Executes the histories of one seed after another.
    fn execute(&self) {
        while !self.over.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            SEED.set(seed);
            if let Err(failure) = check(seed, self.bug) {
                let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(failure);
                self.over.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Shows progress until the time is over or a history fails.
    fn watch(&self, began: Instant, time: Duration) {
        let bar = ProgressBar::new(time.as_secs());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {elapsed} (left {eta}) {msg}") {
            bar.set_style(style);
        }
        while began.elapsed() < time && !self.over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(100));
            bar.set_position(began.elapsed().as_secs());
            bar.set_message(format!("{} histories", self.done.load(Ordering::Relaxed)));
        }
        self.over.store(true, Ordering::Relaxed);
        bar.finish_and_clear();
    }
}
