//! Workloads of several processes whose memory is swapped out before the clock starts.
//!
//! How memory gets out differs: `advise` (the kernel's swap) is `MADV_PAGEOUT`; under memfold, which
//! a program cannot ask, another process (the ballast) takes all that the limit allows and leaves
//! again. Either way everything is out, and nothing else is resident, when the measurement starts.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{Figures, WORKLOAD, WRONG_RESULT, Wrong};
use crate::Options;

/// At least so much of each worker's memory is out before the clock starts.
const OUT: f64 = 0.97;
/// What memfold may still have to do after an unmap ends in this time, even on a busy machine.
const SETTLE: Duration = Duration::from_millis(300);

/// A process of this crew.
#[derive(Debug)]
pub struct Member {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Member {
    /// Starts another workload of this program and returns when it has said its first line.
    pub fn start(role: &str, arguments: &[String]) -> Result<Self> {
        let mut member = Self::begin(role, arguments)?;
        member.answer()?;
        Ok(member)
    }

    fn begin(role: &str, arguments: &[String]) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args([WORKLOAD, role])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("a {role} cannot be started"))?;
        let to = process.stdin.take().context("no input")?;
        let from = process.stdout.take().context("no output")?;
        Ok(Self {
            process,
            to,
            from: BufReader::new(from),
        })
    }

    pub fn tell(&mut self, order: &str) -> Result<()> {
        writeln!(self.to, "{order}").context("a member of the crew is gone")
    }

    pub fn answer(&mut self) -> Result<Figures> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        if line.is_empty() {
            let status = self.process.wait()?;
            if status.code() == Some(WRONG_RESULT) {
                bail!(Wrong("a member of the crew says so".to_owned()));
            }
            bail!("a member of the crew ended: {status}");
        }
        Figures::from_output(&line)
    }

    pub fn ask(&mut self, order: &str) -> Result<Figures> {
        self.tell(order)?;
        self.answer()
    }

    /// Ends it by closing its input, and waits.
    pub fn dismiss(self) -> Result<()> {
        let Self {
            mut process, to, ..
        } = self;
        drop(to);
        let status = process.wait()?;
        ensure!(status.success(), "a member of the crew ended: {status}");
        Ok(())
    }

    /// Its process, to be killed; what it still says goes nowhere.
    pub fn into_process(self) -> Child {
        self.process
    }
}

/// Starts the workers, all at once, and returns when each has filled its memory.
pub fn start_workers(options: &Options) -> Result<Vec<Member>> {
    let mut arguments = Vec::new();
    for name in ["megabytes", "data", "spoil"] {
        if let Some(value) = options.value(name) {
            arguments.extend([format!("--{name}"), value.to_owned()]);
        }
    }
    let count = options.number("processes", 1)?;
    let mut workers = (0..count)
        .map(|_| Member::begin("worker", &arguments))
        .collect::<Result<Vec<_>>>()?;
    for worker in &mut workers {
        worker.answer()?;
    }
    Ok(workers)
}

/// Swaps the workers' memory out, as `--evict` says. Returns the least fraction that is out.
pub fn evict(workers: &mut [Member], options: &Options) -> Result<f64> {
    match options.value("evict").unwrap_or("none") {
        "none" => return Ok(0.0),
        "advise" => {
            for worker in workers.iter_mut() {
                worker.ask("page-out")?;
            }
        }
        "ballast" => return evict_by_ballast(workers, options),
        other => bail!("--evict is none, advise or ballast, not {other:?}"),
    }
    let out = fraction_out(workers)?;
    ensure!(out >= OUT, "only {:.0} % of the memory is out", out * 100.0);
    Ok(out)
}

fn evict_by_ballast(workers: &mut [Member], options: &Options) -> Result<f64> {
    const PASSES: usize = 8;
    let limit = options.number("limit-megabytes", 0)?;
    let data = options.value("data").unwrap_or("phrases");
    let arguments = ["--megabytes", &limit.to_string(), "--data", data].map(str::to_owned);
    let mut ballast = Member::start("ballast", &arguments)?;
    let mut out = fraction_out(workers)?;
    for _ in 0..PASSES {
        if out >= OUT {
            break;
        }
        ballast.ask("again")?;
        out = fraction_out(workers)?;
    }
    ballast.dismiss()?;
    ensure!(out >= OUT, "only {:.0} % of the memory is out", out * 100.0);
    Ok(out)
}

fn fraction_out(workers: &mut [Member]) -> Result<f64> {
    let mut least = 1.0_f64;
    for worker in workers {
        let figures = worker.ask("out?")?;
        least = least.min(figures.get("fraction_out").unwrap_or(0.0));
    }
    Ok(least)
}

/// What all workers answer to an order given at once, figure by figure: the mean, or the worst for
/// what is a maximum already.
fn all_at_once(workers: &mut [Member], order: &str) -> Result<Figures> {
    for worker in workers.iter_mut() {
        worker.tell(order)?;
    }
    let answers = workers
        .iter_mut()
        .map(Member::answer)
        .collect::<Result<Vec<_>>>()?;
    let mut together = Figures::default();
    for (name, _) in &answers[0].0 {
        let values = answers.iter().filter_map(|answer| answer.get(name));
        let value = if name.contains("_max_") {
            values.fold(0.0, f64::max)
        } else {
            values.sum::<f64>() / answers.len() as f64
        };
        together = together.with(name, value);
    }
    Ok(together)
}

/// Has all workers do their timed part at once. `timed_cpu_ms` is what it cost all processors, for
/// each worker: its own time and, under memfold, its supervisor's, until [`SETTLE`] later. Checks
/// come afterwards.
fn timed(workers: Vec<Member>, order: &str, options: &Options, out: f64) -> Result<Figures> {
    let mut workers = workers;
    let supervised = options.value("evict") == Some("ballast");
    // A ballast has just left; what its end costs is not the workers'.
    std::thread::sleep(SETTLE);
    let before = supervisor_milliseconds(supervised)?;
    let mut figures = all_at_once(&mut workers, order)?;
    if supervised {
        std::thread::sleep(SETTLE);
    }
    let supervisor = supervisor_milliseconds(supervised)? - before;
    let own = all_at_once(&mut workers, "spent?")?;
    let own = own
        .get("own_cpu_ms")
        .context("the workers did not say what it cost")?;
    all_at_once(&mut workers, "check")?;
    let count = workers.len() as f64;
    for worker in workers {
        worker.dismiss()?;
    }
    figures.0.retain(|(name, _)| name != "own_cpu_ms");
    Ok(figures
        .with("timed_cpu_ms", own + supervisor / count)
        .with("fraction_out", out))
}

/// `munmap` of memory that is swapped out, by several processes at once.
pub fn munmap(options: &Options) -> Result<Figures> {
    let mut workers = start_workers(options)?;
    let out = evict(&mut workers, options)?;
    timed(workers, "munmap", options, out)
}

/// Reading memory that is swapped out, one word a page, in the order given by `--order`.
pub fn swap_in(options: &Options) -> Result<Figures> {
    let order = match options.value("order").unwrap_or("sequential") {
        "sequential" => "read-sequential",
        "random" => "read-random",
        other => bail!("--order is sequential or random, not {other:?}"),
    };
    let mut workers = start_workers(options)?;
    let out = evict(&mut workers, options)?;
    timed(workers, order, options, out)
}

/// Processor time of this process's parent, which is memfold if it supervises; else 0.
fn supervisor_milliseconds(supervised: bool) -> Result<f64> {
    if !supervised {
        return Ok(0.0);
    }
    let parent = std::os::unix::process::parent_id();
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir(format!("/proc/{parent}/task"))? {
        // A thread may end meanwhile.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        let first = text
            .split_whitespace()
            .next()
            .and_then(|word| word.parse::<f64>().ok());
        nanoseconds += first.context("no schedstat (CONFIG_SCHED_INFO)")?;
    }
    Ok(nanoseconds / 1e6)
}

/// Waits for a process and says when it was gone.
pub fn gone_after(mut process: Child, since: Instant) -> Result<Duration> {
    process.wait()?;
    Ok(since.elapsed())
}
