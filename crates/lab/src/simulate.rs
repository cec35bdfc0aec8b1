//! The pager's core under a simulated kernel, for as long as one likes.

use std::{
    cell::Cell,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use memfold_simulation::{
    bugs::Bug,
    simulation::{
        explore::{Failure, check, shorten},
        history::History,
        trace,
    },
};

use crate::{
    Options, SIMULATION_FAILED,
    report::{Report, Row},
};

/// Longest search for a shorter history that fails, too, unless `--minutes` is less.
const PATIENCE: Duration = Duration::from_secs(60);

thread_local! {
    /// The seed of the history that this thread executes, if it executes one.
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A history that fails.
#[derive(Debug)]
pub struct Failed(String);

impl fmt::Display for Failed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

/// Executes histories until the time is over or one fails; prints the report, also of a failure.
pub fn run(options: &Options) -> Result<()> {
    let (report, failed) = search(options)?;
    report.print(options.json)?;
    failed.map_or(Ok(()), |failed| Err(failed.into()))
}

fn search(options: &Options) -> Result<(Report, Option<Failed>)> {
    let bug = options.value("bug").map(bug_of).transpose()?;
    let first = options.number("seed", 0)? as u64;
    if options.has("trace") {
        // Panics are shown, with `RUST_BACKTRACE=1` where they came from.
        exit_after_panics();
        trace::set(true);
        let failed = check(first, bug).err();
        trace::set(false);
        let failed = failed.map(|failure| Failed(failure.to_string()));
        return Ok((Report::new("simulate"), failed));
    }
    let minutes = options.value("minutes").unwrap_or("1");
    let time = minutes.parse().ok().map(|minutes: f64| minutes * 60.0);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.with_context(|| format!("--minutes takes a number, not {minutes:?}"))?;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let threads = options.number("threads", cpus)?.max(1);
    let search = Arc::new(Search {
        first,
        threads,
        began: Instant::now(),
        next: AtomicU64::new(first),
        done: AtomicU64::new(0),
        steps: AtomicU64::new(0),
        over: AtomicBool::new(false),
        is_reported: AtomicBool::new(false),
        failure: Mutex::default(),
        bug,
    });
    report_panics(&search, options.json);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| search.execute());
        }
        search.watch(time);
    });
    let failed = search.lock_failure().take();
    let report = search.report(failed.as_ref().map(|failure| failure.history.seed));
    let failed = failed.map(|failure| {
        let seed = failure.history.seed;
        let others = search.done.load(Ordering::Relaxed) - 1;
        let shortest = shorten(failure, bug, PATIENCE.min(time));
        Failed(format!(
            "seed {seed} fails, after {others} others; the shortest history found that fails: {shortest}\
             (step by step: --seed {seed} --trace)"
        ))
    });
    Ok((report, failed))
}

fn bug_of(name: &str) -> Result<Bug> {
    let bugs: Vec<Bug> = Bug::ALL
        .into_iter()
        .chain(Bug::RARE)
        .chain(Bug::OF_HANGS)
        .collect();
    let named = |bug: &&Bug| format!("{bug:?}") == name;
    let found = bugs.iter().find(named).copied();
    found.with_context(|| format!("--bug takes one of {bugs:?}, not {name:?}"))
}

/// Where panics abort, as in a release build, one in a history prints the report and exits with 1:
/// nothing catches it. Elsewhere panics are silent: the search says what failed.
fn report_panics(search: &Arc<Search>, as_json: bool) {
    if !cfg!(panic = "abort") {
        std::panic::set_hook(Box::new(|_| {}));
        return;
    }
    let search = Arc::clone(search);
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| match SEED.get() {
        Some(seed) => {
            let (search, why) = (Arc::clone(&search), panic.to_string());
            exit_elsewhere(move || search.report_panic(seed, as_json, &why));
        }
        None => default(panic),
    }));
}

/// With `--trace` the same without a report.
fn exit_after_panics() {
    if cfg!(panic = "abort") {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            default(panic);
            exit_elsewhere(|| {});
        }));
    }
}

/// Ends the process in a thread of its own: exit(3) calls the destructors of the calling thread, which
/// is in the middle of an execution.
fn exit_elsewhere(last: impl FnOnce() + Send + 'static) -> ! {
    thread::spawn(move || exit_after(last));
    loop {
        thread::park();
    }
}

fn exit_after(last: impl FnOnce()) {
    last();
    std::process::exit(SIMULATION_FAILED.into());
}

struct Search {
    /// The first seed.
    first: u64,
    threads: usize,
    began: Instant,
    next: AtomicU64,
    done: AtomicU64,
    /// Steps of the programs in these histories.
    steps: AtomicU64,
    over: AtomicBool,
    failure: Mutex<Option<Failure>>,
    bug: Option<Bug>,
    /// Whether a panic has printed the report.
    is_reported: AtomicBool,
}

impl Search {
    /// Executes the histories of one seed after another.
    fn execute(&self) {
        while !self.over.load(Ordering::Relaxed) {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            let steps = History::of_seed(seed).steps() as u64;
            SEED.set(Some(seed));
            let checked = check(seed, self.bug);
            SEED.set(None);
            if let Err(failure) = checked {
                self.lock_failure().get_or_insert(failure);
                self.over.store(true, Ordering::Relaxed);
            }
            self.count(steps);
        }
    }

    /// Counts a history with this number of steps.
    fn count(&self, steps: u64) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.steps.fetch_add(steps, Ordering::Relaxed);
    }

    fn lock_failure(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The report so far.
    fn report(&self, failed_seed: Option<u64>) -> Report {
        let mut report = Report::new("simulate");
        report.add(
            Row::new()
                .with("histories", self.done.load(Ordering::Relaxed))
                .with("steps", self.steps.load(Ordering::Relaxed))
                .with("failures", usize::from(failed_seed.is_some()))
                .with("failed_seed", failed_seed)
                .with("first_seed", self.first)
                .with("seconds", self.began.elapsed().as_secs())
                .with("threads", self.threads)
                .with("runs", 1)
                .with("spread", 1.0),
        );
        report
    }

    /// Prints what the command would have.
    fn report_panic(&self, seed: u64, as_json: bool, why: &str) {
        // Another thread's history may fail meanwhile: the first exits for both.
        while self.is_reported.swap(true, Ordering::Relaxed) {
            thread::park();
        }
        self.count(History::of_seed(seed).steps() as u64);
        // An error leaves nothing else to do.
        let _ = self.report(Some(seed)).print(as_json);
        eprintln!(
            "memfold-lab: seed {seed} fails: {why}\n(a build without --release finds a shorter history)"
        );
    }

    /// Shows progress until the time is over or a history fails.
    fn watch(&self, time: Duration) {
        let bar = ProgressBar::new(time.as_secs());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {elapsed} (left {eta}) {msg}") {
            bar.set_style(style);
        }
        while self.began.elapsed() < time && !self.over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(100));
            bar.set_position(self.began.elapsed().as_secs());
            bar.set_message(format!("{} histories", self.done.load(Ordering::Relaxed)));
        }
        self.over.store(true, Ordering::Relaxed);
        bar.finish_and_clear();
    }
}
