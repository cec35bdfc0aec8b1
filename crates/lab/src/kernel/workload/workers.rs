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
use crate::{
    Options,
    clock::cpu_of,
    soak::{Supervisor, number},
};

/// Fraction of each worker's memory that must be swapped out before the clock starts.
pub const MIN_FRACTION_OUT: f64 = 0.97;
/// For as long memfold must do little before its work counts as done.
const SETTLE_TIME: Duration = Duration::from_millis(300);
/// CPU time of memfold in that time which counts as little: a tenth. A smaller value takes the samples
/// of sizes for work; a thread that frees memory takes more even on a busy machine.
const UPKEEP: Duration = Duration::from_millis(30);
/// Interval at which its pool is looked at until it is drained.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long its work may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What may be left in the pool of what was in it, and of other processes' pages.
const LEFT_IN_POOL: f64 = 0.25;
const LEFT_OF_OTHERS: f64 = (2 << 20) as f64;

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
/// per worker: its own and, under memfold, its share of the supervisor's until that has nothing left
/// to do, which after a `munmap` is not before its pool is drained.
fn timed(workers: Vec<Worker>, order: &str, options: &Options, out: f64) -> Result<Figures> {
    let mut workers = workers;
    let memfold = (options.value("evict") == Some("ballast")).then(Memfold::parent);
    // Let the exit of the ballast finish, so that neither its cost nor its pages are accounted to the
    // workers.
    let (pool, before) = match &memfold {
        Some(memfold) => {
            memfold.settled()?;
            (memfold.pool_bytes()?, memfold.settled()?)
        }
        None => {
            std::thread::sleep(SETTLE_TIME);
            (0.0, Duration::ZERO)
        }
    };
    let mut figures = all_at_once(&mut workers, order)?;
    let mut supervisor = 0.0;
    if let Some(memfold) = &memfold {
        // A drainer that gets no CPU does little, too: the pool tells that it is done.
        if order == "munmap" {
            memfold.wait_until_drained(pool)?;
        }
        supervisor = memfold.settled()?.saturating_sub(before).as_secs_f64() * 1e3;
    }
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

/// The memfold that runs this process.
#[derive(Debug)]
struct Memfold(u32);

impl Memfold {
    fn parent() -> Self {
        Self(std::os::unix::process::parent_id())
    }

    /// Its CPU time once it has nothing left to do.
    fn settled(&self) -> Result<Duration> {
        let deadline = Instant::now() + TIMEOUT;
        let mut before = cpu_of(self.0)?;
        loop {
            std::thread::sleep(SETTLE_TIME);
            let now = cpu_of(self.0)?;
            if now.saturating_sub(before) <= UPKEEP {
                return Ok(now);
            }
            ensure!(
                Instant::now() < deadline,
                "memfold still works {} s after the timed part",
                TIMEOUT.as_secs()
            );
            before = now;
        }
    }

    /// Waits until its pool, which held `before` bytes before they were unmapped, is drained.
    fn wait_until_drained(&self, before: f64) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let drained = check_drained(before, self.pool_bytes()?);
            if drained.is_ok() || Instant::now() >= deadline {
                return drained;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn pool_bytes(&self) -> Result<f64> {
        let binary = format!("/proc/{}/exe", self.0);
        let stat = Supervisor::new(binary.as_ref(), self.0).stat()?;
        Ok(number(&stat, "pool_bytes")? as f64)
    }
}

/// Fails if not all is freed that was in the pool before it was unmapped, [`TIMEOUT`] ago.
fn check_drained(before: f64, after: f64) -> Result<()> {
    ensure!(
        after <= before * LEFT_IN_POOL + LEFT_OF_OTHERS,
        "{:.1} of {:.1} MiB are in memfold's pool although their pages are unmapped for {} s",
        after / f64::from(1 << 20),
        before / f64::from(1 << 20),
        TIMEOUT.as_secs()
    );
    Ok(())
}

/// Reaps a process. Returns the time of its exit since `since`.
pub fn gone_after(mut process: Child, since: Instant) -> Result<Duration> {
    process.wait()?;
    Ok(since.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_not_drained_is_an_error() {
        let mebibytes = |count: u32| f64::from(count << 20);
        check_drained(mebibytes(110), mebibytes(3)).unwrap();
        let error = check_drained(mebibytes(110), mebibytes(60)).unwrap_err();
        assert!(
            error.to_string().starts_with("60.0 of 110.0 MiB"),
            "{error}"
        );
    }
}
