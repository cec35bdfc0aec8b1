//! Workloads of several processes whose memory is evicted before the clock starts.
//!
//! Under the kernel's swap (`--evict advise`) each worker calls `MADV_PAGEOUT`. memfold has no such
//! call for supervised programs, so another process, the ballast (`--evict ballast`), touches as
//! much memory as the limit allows and exits. In both cases the workers' memory is swapped out, and
//! nothing else is resident, when the timed part starts.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{Figures, WORKLOAD, WRONG_RESULT, Wrong};
use crate::Options;

/// Fraction of each worker's memory that must be swapped out before the clock starts.
const MIN_FRACTION_OUT: f64 = 0.97;
/// How long memfold's CPU time is accounted for after the timed part: enough for its background
/// work, even on a busy machine.
const SETTLE_TIME: Duration = Duration::from_millis(300);

/// A child process that runs a workload and obeys orders on its standard input.
#[derive(Debug)]
pub struct Worker {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a workload of the lab and waits for its first line.
    pub fn start(role: &str, arguments: &[String]) -> Result<Self> {
        let mut worker = Self::spawn(role, arguments)?;
        worker.receive()?;
        Ok(worker)
    }

    fn spawn(role: &str, arguments: &[String]) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args([WORKLOAD, role])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the workload {role}"))?;
        let to = process
            .stdin
            .take()
            .context("the worker has no standard input")?;
        let from = process
            .stdout
            .take()
            .context("the worker has no standard output")?;
        Ok(Self {
            process,
            to,
            from: BufReader::new(from),
        })
    }

    /// Sends an order.
    pub fn send(&mut self, order: &str) -> Result<()> {
        writeln!(self.to, "{order}").context("cannot write to a worker process: it has exited")
    }

    /// Receives the reply to an order.
    pub fn receive(&mut self) -> Result<Figures> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        if line.is_empty() {
            let status = self.process.wait()?;
            if status.code() == Some(WRONG_RESULT) {
                bail!(Wrong("see the worker's error above".to_owned()));
            }
            bail!("a worker process exited with {status}");
        }
        Figures::from_output(&line)
    }

    /// Sends an order and receives the reply.
    pub fn request(&mut self, order: &str) -> Result<Figures> {
        self.send(order)?;
        self.receive()
    }

    /// Closes its standard input and reaps it.
    pub fn stop(self) -> Result<()> {
        let Self {
            mut process, to, ..
        } = self;
        drop(to);
        let status = process.wait()?;
        ensure!(status.success(), "a worker process exited with {status}");
        Ok(())
    }

    /// Its process, to be killed; further output is discarded.
    pub fn into_process(self) -> Child {
        self.process
    }
}

/// Starts all workers at once, and waits until each has filled its memory.
pub fn start_workers(options: &Options) -> Result<Vec<Worker>> {
    let mut arguments = Vec::new();
    for name in ["megabytes", "data", "spoil"] {
        if let Some(value) = options.value(name) {
            arguments.extend([format!("--{name}"), value.to_owned()]);
        }
    }
    let count = options.number("processes", 1)?;
    let mut workers = (0..count)
        .map(|_| Worker::spawn("worker", &arguments))
        .collect::<Result<Vec<_>>>()?;
    for worker in &mut workers {
        worker.receive()?;
    }
    Ok(workers)
}

/// Evicts the workers' memory as `--evict` selects. Returns the smallest fraction swapped out.
pub fn evict(workers: &mut [Worker], options: &Options) -> Result<f64> {
    match options.value("evict").unwrap_or("none") {
        "none" => return Ok(0.0),
        "advise" => {
            for worker in workers.iter_mut() {
                worker.request("page-out")?;
            }
        }
        "ballast" => return evict_by_ballast(workers, options),
        other => bail!("--evict is none, advise or ballast, not {other:?}"),
    }
    let out = fraction_out(workers)?;
    ensure!(
        out >= MIN_FRACTION_OUT,
        "only {:.0} % of the workers' memory was swapped out",
        out * 100.0
    );
    Ok(out)
}

fn evict_by_ballast(workers: &mut [Worker], options: &Options) -> Result<f64> {
    /// Passes of the ballast over its memory before eviction counts as failed. memfold takes pages of each program by what it
    /// has left, so the last of a worker's take several.
    const PASSES: usize = 32;
    let limit = options.number("limit-megabytes", 0)?;
    let data = options.value("data").unwrap_or("phrases");
    let arguments = ["--megabytes", &limit.to_string(), "--data", data].map(str::to_owned);
    let mut ballast = Worker::start("ballast", &arguments)?;
    let mut out = fraction_out(workers)?;
    for _ in 0..PASSES {
        if out >= MIN_FRACTION_OUT {
            break;
        }
        ballast.request("again")?;
        out = fraction_out(workers)?;
    }
    ballast.stop()?;
    ensure!(
        out >= MIN_FRACTION_OUT,
        "only {:.0} % of the workers' memory was swapped out",
        out * 100.0
    );
    Ok(out)
}

fn fraction_out(workers: &mut [Worker]) -> Result<f64> {
    let mut least = 1.0_f64;
    for worker in workers {
        let figures = worker.request("out?")?;
        least = least.min(figures.get("fraction_out").unwrap_or(0.0));
    }
    Ok(least)
}

/// Sends an order to all workers at once and combines their replies: the mean of each figure, or
/// the maximum if it is a maximum itself.
fn all_at_once(workers: &mut [Worker], order: &str) -> Result<Figures> {
    for worker in workers.iter_mut() {
        worker.send(order)?;
    }
    let answers = workers
        .iter_mut()
        .map(Worker::receive)
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

/// Runs the timed part in all workers at once, then verifies memory. `timed_cpu_ms` is the CPU time
/// per worker: its own and, under memfold, its share of the supervisor's until [`SETTLE_TIME`]
/// later.
fn timed(workers: Vec<Worker>, order: &str, options: &Options, out: f64) -> Result<Figures> {
    let mut workers = workers;
    let supervised = options.value("evict") == Some("ballast");
    // Let the exit of the ballast finish, so that its cost is not accounted to the workers.
    std::thread::sleep(SETTLE_TIME);
    let before = supervisor_milliseconds(supervised)?;
    let mut figures = all_at_once(&mut workers, order)?;
    if supervised {
        std::thread::sleep(SETTLE_TIME);
    }
    let supervisor = supervisor_milliseconds(supervised)? - before;
    let own = all_at_once(&mut workers, "spent?")?;
    let own = own
        .get("own_cpu_ms")
        .context("the workers reported no own_cpu_ms")?;
    all_at_once(&mut workers, "check")?;
    let count = workers.len() as f64;
    for worker in workers {
        worker.stop()?;
    }
    figures.0.retain(|(name, _)| name != "own_cpu_ms");
    Ok(figures
        .with("timed_cpu_ms", own + supervisor / count)
        .with("fraction_out", out))
}

/// `munmap` of swapped-out memory by several processes at once.
pub fn munmap(options: &Options) -> Result<Figures> {
    let mut workers = start_workers(options)?;
    let out = evict(&mut workers, options)?;
    timed(workers, "munmap", options, out)
}

/// Reads one word of each swapped-out page, in the order `--order`.
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

/// CPU time of the parent process, which is memfold if `supervised`; else 0.
fn supervisor_milliseconds(supervised: bool) -> Result<f64> {
    if !supervised {
        return Ok(0.0);
    }
    let parent = std::os::unix::process::parent_id();
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir(format!("/proc/{parent}/task"))? {
        // The thread may have exited meanwhile.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        let first = text
            .split_whitespace()
            .next()
            .and_then(|word| word.parse::<f64>().ok());
        nanoseconds +=
            first.context("/proc has no schedstat: the kernel lacks CONFIG_SCHED_INFO")?;
    }
    Ok(nanoseconds / 1e6)
}

/// Reaps a process. Returns the time of its exit since `since`.
pub fn gone_after(mut process: Child, since: Instant) -> Result<Duration> {
    process.wait()?;
    Ok(since.elapsed())
}
