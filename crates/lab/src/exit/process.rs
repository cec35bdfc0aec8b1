//! The processes of the experiment: programs that hold memory until they are killed, and the
//! newcomer, which starts at that time.

use std::{
    hint::black_box,
    io::{BufRead, BufReader, Write},
    mem::MaybeUninit,
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memfold_swap::Page;

use crate::{Options, contents};

/// The hidden subcommand that holds memory.
pub const PROGRAM: &str = "exit-program";
/// The hidden subcommand of the newcomer.
pub const NEWCOMER: &str = "exit-newcomer";

/// Printed once the memory is touched.
const DONE: &str = "ready";

/// Holds `--pages` of memory until it is killed.
pub fn hold(options: &Options) -> Result<()> {
    let pages = options.number("pages", 0)?;
    let memory = touch(pages);
    println!("{DONE}");
    // Until SIGKILL, or end of file because the lab exited.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    black_box(&memory);
    Ok(())
}

/// Touches `--pages` of memory, prints [`DONE`], and exits.
pub fn start(options: &Options) -> Result<()> {
    let memory = touch(options.number("pages", 0)?);
    println!("{DONE}");
    std::io::stdout().flush()?;
    black_box(&memory);
    Ok(())
}

fn touch(pages: usize) -> Vec<Page> {
    let contents = contents::compressible(64);
    contents.iter().copied().cycle().take(pages).collect()
}

/// A child process; killed and reaped on drop.
pub struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Its CPU time when it was ready.
    used: Duration,
    /// Whether it was reaped.
    ended: bool,
}

impl Process {
    /// Starts `subcommand` of the lab with `pages` pages.
    pub fn spawn(
        subcommand: &str,
        pages: usize,
        prepare: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args([subcommand, "--pages", &pages.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        prepare(&mut command)?;
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {subcommand}"))?;
        let output = child
            .stdout
            .take()
            .with_context(|| format!("{subcommand} has no standard output"))?;
        Ok(Self {
            child,
            output: BufReader::new(output),
            used: Duration::ZERO,
            ended: false,
        })
    }

    /// Waits until it has touched its memory.
    pub fn ready(&mut self) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(
            line.trim() == DONE,
            "a program exited before it had touched its memory"
        );
        self.used = self.cpu_time()?;
        Ok(())
    }

    fn cpu_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/schedstat", self.child.id());
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let nanoseconds = text
            .split_whitespace()
            .next()
            .context("schedstat is empty")?;
        Ok(Duration::from_nanos(nanoseconds.parse()?))
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill a program")
    }

    /// Reaps it. Returns its CPU time since it was ready.
    pub fn wait(&mut self) -> Result<Duration> {
        let pid = libc::pid_t::try_from(self.child.id())?;
        let mut status = 0;
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the child is not reaped yet, and both pointers are valid for writes.
        let waited = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
        ensure!(waited == pid, "wait4 of PID {pid} failed");
        self.ended = true;
        // SAFETY: the call succeeded, and any bit pattern is a valid `rusage`.
        let usage = unsafe { usage.assume_init() };
        let time = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
        };
        let used = time(usage.ru_utime) + time(usage.ru_stime);
        Ok(used.saturating_sub(self.used))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
