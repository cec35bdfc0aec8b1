//! One run of a program: wall time, CPU time and output.

use std::{
    io::{self, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::workload::{Figures, WRONG_RESULT, Wrong};

/// The result of a program that has exited.
#[derive(Debug)]
pub struct Outcome {
    /// Its standard output.
    pub output: String,
    /// Wall time.
    pub seconds: f64,
    /// Its CPU time.
    pub figures: Figures,
}

/// Runs a program, with `watch` beside it, which must return soon after its flag is set. Captures
/// standard output.
pub fn run(mut command: Command, watch: impl FnOnce(&AtomicBool) + Send) -> Result<Outcome> {
    let started = Instant::now();
    let mut child = start(command.stdout(Stdio::piped()))?;
    let mut pipe = child
        .stdout
        .take()
        .context("the program has no standard output")?;
    let stop = AtomicBool::new(false);
    let (output, cpu, seconds) = std::thread::scope(|scope| -> Result<_> {
        let watcher = scope.spawn(|| watch(&stop));
        let mut output = String::new();
        let read = pipe.read_to_string(&mut output);
        let ended = end(child);
        let seconds = started.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        watcher.thread().unpark();
        read.context("the program's output is not UTF-8")?;
        Ok((output, ended?, seconds))
    })?;
    check(cpu.status)?;
    Ok(Outcome {
        output,
        seconds,
        figures: cpu.figures(),
    })
}

/// Starts a program that is killed when the lab exits.
pub fn start(command: &mut Command) -> Result<Child> {
    start_to_end_with_us(command, libc::SIGKILL)
}

/// Starts a program that receives `signal` when the thread that started it exits.
pub fn start_to_end_with_us(command: &mut Command, signal: libc::c_int) -> Result<Child> {
    let own = std::process::id().cast_signed();
    let follow = move || {
        // SAFETY: neither touches memory. Each is one system call: async-signal-safe, no allocation.
        let (set, parent) =
            unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, signal), libc::getppid()) };
        match set {
            // This process ended before it was asked for the signal.
            0 if parent != own => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: see above.
    unsafe { command.pre_exec(follow) };
    let name = command.get_program().to_owned();
    command
        .spawn()
        .with_context(|| format!("cannot start {}", name.display()))
}

/// Exit status and CPU time of a process, children that it reaped included.
#[derive(Debug, Clone, Copy)]
pub struct CpuUsage {
    /// Exit status.
    pub status: ExitStatus,
    user: Duration,
    system: Duration,
}

impl CpuUsage {
    /// CPU time as figures.
    pub fn figures(&self) -> Figures {
        let (user, system) = (self.user.as_secs_f64(), self.system.as_secs_f64());
        Figures::default()
            .with("cpu_user_s", user)
            .with("cpu_system_s", system)
            .with("cpu_total_s", user + system)
    }
}

/// Reaps a process.
pub fn end(child: Child) -> Result<CpuUsage> {
    let process = libc::pid_t::try_from(child.id())?;
    let mut status = 0;
    // SAFETY: an all-zero rusage is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are valid for writes. `child` is consumed, so the PID is not waited
        // for again.
        let waited = unsafe { libc::wait4(process, &raw mut status, 0, &raw mut usage) };
        if waited == process {
            break;
        }
        let error = io::Error::last_os_error();
        ensure!(error.kind() == io::ErrorKind::Interrupted, "wait4: {error}");
    }
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    Ok(CpuUsage {
        status: ExitStatus::from_raw(status),
        user: duration(usage.ru_utime),
        system: duration(usage.ru_stime),
    })
}

/// Fails unless a program exited with status 0.
pub fn check(status: ExitStatus) -> Result<()> {
    if status.code() == Some(WRONG_RESULT) {
        bail!(Wrong("see the workload's error above".to_owned()));
    }
    ensure!(status.success(), "the program exited with {status}");
    Ok(())
}
