//! One run of a program: its time, its output, and what it took of the processors.

use std::{
    io::{self, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::workload::{Figures, WRONG_RESULT, Wrong};

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub output: String,
    pub seconds: f64,
    pub figures: Figures,
}

/// Runs a program to its end, beside `watch`, which ends soon after its flag is set. The program's
/// standard output is kept.
pub fn run(mut command: Command, watch: impl FnOnce(&AtomicBool) + Send) -> Result<Ended> {
    let started = Instant::now();
    let mut child = start(command.stdout(Stdio::piped()))?;
    let mut pipe = child.stdout.take().context("no output")?;
    let stop = AtomicBool::new(false);
    let (output, cpu, seconds) = std::thread::scope(|scope| -> Result<_> {
        let watcher = scope.spawn(|| watch(&stop));
        let mut output = String::new();
        let read = pipe.read_to_string(&mut output);
        let ended = end(child);
        let seconds = started.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        watcher.thread().unpark();
        read.context("the program's output is no text")?;
        Ok((output, ended?, seconds))
    })?;
    check(cpu.status)?;
    Ok(Ended {
        output,
        seconds,
        figures: cpu.figures(),
    })
}

/// Starts a program that does not outlive the lab.
pub fn start(command: &mut Command) -> Result<Child> {
    start_to_end_with_us(command, libc::SIGKILL)
}

/// Starts a program that gets `signal` when the thread that starts it ends.
pub fn start_to_end_with_us(command: &mut Command, signal: libc::c_int) -> Result<Child> {
    // SAFETY: prctl with these arguments is one system call: async-signal-safe, no allocation.
    unsafe {
        command.pre_exec(move || match libc::prctl(libc::PR_SET_PDEATHSIG, signal) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let name = command.get_program().to_owned();
    command
        .spawn()
        .with_context(|| format!("{} cannot be started", name.display()))
}

/// What a process, and all it waited for, took.
#[derive(Debug, Clone, Copy)]
pub struct Processors {
    pub status: ExitStatus,
    user: Duration,
    system: Duration,
}

impl Processors {
    pub fn figures(&self) -> Figures {
        let (user, system) = (self.user.as_secs_f64(), self.system.as_secs_f64());
        Figures::default()
            .with("cpu_user_s", user)
            .with("cpu_system_s", system)
            .with("cpu_total_s", user + system)
    }
}

/// Waits for a process.
pub fn end(child: Child) -> Result<Processors> {
    let process = libc::pid_t::try_from(child.id())?;
    let mut status = 0;
    // SAFETY: an all-zero rusage is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to values of ours. `child` is consumed, so that nobody waits
        // for the process number again.
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
    Ok(Processors {
        status: ExitStatus::from_raw(status),
        user: duration(usage.ru_utime),
        system: duration(usage.ru_stime),
    })
}

/// Fails unless a program ended well.
pub fn check(status: ExitStatus) -> Result<()> {
    if status.code() == Some(WRONG_RESULT) {
        bail!(Wrong("the workload says so (see above)".to_owned()));
    }
    ensure!(status.success(), "the program ended with {status}");
    Ok(())
}
