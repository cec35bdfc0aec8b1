//! One run of a case: filled, visited once, left at rest, ended.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use super::case::Case;
use crate::{
    clock::cpu_of,
    host::while_running,
    kernel::start_to_end_with_us,
    soak::{Supervisor, kibibytes, number},
};

/// From the end of the visits until memfold is taken to be at rest.
const SETTLE: Duration = Duration::from_secs(2);
/// From the end of the writing to the visits: the last batches are stored.
const PAUSE: Duration = Duration::from_millis(300);

/// What every run takes.
#[derive(Debug)]
pub struct Setup {
    /// The memfold binary.
    pub memfold: PathBuf,
    /// The compiled program.
    pub program: PathBuf,
    /// For how long memfold is watched at rest.
    pub rest: Duration,
    /// One page is changed behind the programs' back, which must fail the run.
    pub is_spoilt: bool,
}

/// The figures of one run.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    /// Pages that came in during the visits, and those that went out.
    pub pages_in: f64,
    pub pages_out: f64,
    /// Wall time of the visits for each page that came in.
    pub wall_us: f64,
    /// CPU time of the programs, their helpers included, for each.
    pub program_us: f64,
    /// CPU time of memfold's process for each.
    pub memfold_us: f64,
    /// memfold's own memory, and the programs' memory, in memory and out.
    pub own_bytes: f64,
    pub managed_bytes: f64,
    /// CPU time of memfold's process at rest, in per cent of a CPU.
    pub rest_percent: f64,
}

/// Compiles the program into a folder.
pub fn compile(folder: &Path) -> Result<PathBuf> {
    let (source, program) = (folder.join("pages.c"), folder.join("pages"));
    fs::write(&source, include_str!("../../programs/growth/pages.c"))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-pthread", "-o"]);
    compiler.arg(&program).arg(&source);
    let status = compiler
        .status()
        .context("growth needs a C compiler (Debian: gcc): cannot start cc")?;
    ensure!(status.success(), "cc cannot compile pages.c: {status}");
    Ok(program)
}

/// Runs a case once.
pub fn measure(case: Case, setup: &Setup) -> Result<Figures> {
    let mut run = Run::start(case, setup)?;
    let pid = run.child.id();
    let figures = while_running(pid, || run.measure(setup))?;
    let figures = figures?;
    run.end()?;
    Ok(figures)
}

/// Counters of memfold.
struct Counters {
    pages_in: u64,
    pages_out: u64,
    needed_bytes: u64,
    pool_bytes: u64,
}

impl Counters {
    fn of(supervisor: &Supervisor) -> Result<Self> {
        let stat = supervisor.stat()?;
        let number = |name: &str| number(&stat, name);
        Ok(Self {
            pages_in: number("pages_in")?,
            pages_out: number("pages_out")?,
            needed_bytes: number("peak_needed_bytes")?,
            pool_bytes: number("pool_bytes")?,
        })
    }
}

/// memfold with the programs of a case.
struct Run {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Run {
    fn start(case: Case, setup: &Setup) -> Result<Self> {
        let mut command = Command::new(&setup.memfold);
        command
            .args(["run", "--quiet", "--resident"])
            .arg(case.resident_bytes().to_string())
            .arg("--")
            .arg(&setup.program)
            .args(
                [case.processes, case.pages, case.mappings, case.threads]
                    .map(|number| number.to_string()),
            )
            .args(setup.is_spoilt.then_some("spoil"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = start_to_end_with_us(&mut command, libc::SIGKILL)?;
        let input = child.stdin.take();
        let output = child.stdout.take();
        let output = output.context("memfold has no standard output")?;
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
        })
    }

    fn measure(&mut self, setup: &Setup) -> Result<Figures> {
        let pid = self.child.id();
        let supervisor = Supervisor::new(&setup.memfold, pid);
        let line = self.line()?;
        ensure!(line == "ready", "the programs printed {line:?}");
        std::thread::sleep(PAUSE);
        let before = Counters::of(&supervisor)?;
        let own = cpu_of(pid)?;
        let input = self.input.as_mut();
        writeln!(input.context("memfold has no standard input")?, "p")?;
        let line = self.line()?;
        let own = cpu_of(pid)?.saturating_sub(own);
        let after = Counters::of(&supervisor)?;
        let own_bytes = own_bytes(pid, after.pool_bytes)?;
        let (wall, program) = line.split_once(' ').context("the programs' times")?;
        let (wall, program): (f64, f64) = (wall.parse()?, program.parse()?);
        std::thread::sleep(SETTLE);
        let rest = cpu_of(pid)?;
        std::thread::sleep(setup.rest);
        let rest = cpu_of(pid)?.saturating_sub(rest);
        let pages_in = after.pages_in.saturating_sub(before.pages_in);
        ensure!(
            pages_in > 0,
            "no page was out, so that nothing was measured"
        );
        let each = |nanoseconds: f64| nanoseconds / 1e3 / pages_in as f64;
        Ok(Figures {
            pages_in: pages_in as f64,
            pages_out: after.pages_out.saturating_sub(before.pages_out) as f64,
            wall_us: each(wall),
            program_us: each(program),
            memfold_us: each(own.as_nanos() as f64),
            own_bytes: own_bytes as f64,
            managed_bytes: after.needed_bytes as f64,
            rest_percent: rest.as_secs_f64() / setup.rest.as_secs_f64() * 100.0,
        })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            let status = self.child.wait()?;
            anyhow::bail!("the programs ended early ({status}): see the errors above");
        }
        Ok(line.trim().to_owned())
    }

    /// Ends the programs, and memfold with them, by the end of their input.
    fn end(mut self) -> Result<()> {
        drop(self.input.take());
        let status = self.child.wait()?;
        ensure!(status.success(), "the programs ended with {status}");
        Ok(())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Both fail if it was reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Anonymous and shared memory of a process and its page tables, without the pool.
fn own_bytes(pid: u32, pool: u64) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    own_of(&status, pool).with_context(|| format!("{path} has no sizes"))
}

fn own_of(status: &str, pool: u64) -> Option<u64> {
    let mut sum = 0;
    for name in ["RssAnon:", "RssShmem:", "VmPTE:"] {
        sum += kibibytes(status, name)? << 10;
    }
    Some(sum.saturating_sub(pool))
}

/// Memory that programs can have without swapping, in bytes.
pub fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = kibibytes(&text, "MemAvailable:").context("no MemAvailable")?;
    Ok(available << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_what_is_neither_pool_nor_code() {
        let status = "Name:\tmemfold\nRssAnon:\t    3000 kB\nRssFile:\t 9000 kB\nRssShmem:\t  40 kB\n\
            VmPTE:\t      60 kB\n";
        assert_eq!(own_of(status, 1000 << 10), Some(2100 << 10));
        assert_eq!(own_of("RssAnon:\t 3 kB\n", 0), None);
    }

    #[test]
    fn memory_is_available() {
        assert!(available_bytes().unwrap() > 1 << 20);
    }
}
