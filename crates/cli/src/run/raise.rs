//! Stopping and ending this process by a signal.

use nix::sys::signal::{SigEvent, SigHandler, SigSet, SigevNotify, Signal, raise, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use std::time::Duration;

/// Stops this process as `signal` does, until it is continued, if that `is_due` still. The signal must be blocked in
/// all threads.
pub fn stop_by(signal: Signal, is_due: impl FnOnce() -> bool) -> nix::Result<()> {
    let set = SigSet::from(signal);
    // Raised while it is blocked: one that is pending already (the terminal's own, if no thread has read it) would
    // stop the process as soon as it is unblocked, and this one a second time after that. `SIGCONT` discards what is
    // pending of both, also before they stop anything.
    raise(signal)?;
    if !is_due() {
        let pending = SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // None where it was discarded.
        pending.read_signal()?;
        return Ok(());
    }
    set.thread_unblock()?;
    set.thread_block()
}

/// As [`stop_by`], for some time at most.
pub fn stop_awhile(signal: Signal, time: Duration) -> nix::Result<()> {
    // A signal continues what no thread of the process can any more. One that comes before the stop has no effect:
    // others follow later, each of a timer of its own, as one that repeats waits until its signal is taken.
    let mut timers = Vec::new();
    for factor in [1, 5, 25] {
        let event = SigEvent::new(SigevNotify::SigevSignal {
            signal: Signal::SIGCONT,
            si_value: 0,
        });
        let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, event)?;
        let expiration = Expiration::OneShot((time * factor).into());
        timer.set(expiration, TimerSetTimeFlags::empty())?;
        timers.push(timer);
    }
    stop_by(signal, || true)
}

/// Ends this process as a signal of this number does. Returns where it cannot: a number that is
/// no standard signal, or the first process of a container, which default actions do not reach.
pub fn die_by(number: i32) {
    let Ok(which) = Signal::try_from(number) else {
        return;
    };
    // SAFETY: sets the default action; no handler is installed.
    let _ = unsafe { signal(which, SigHandler::SigDfl) };
    if SigSet::from(which).thread_unblock().is_ok() {
        let _ = raise(which);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::time::Instant;

    const STOPS: &str = "MEMFOLD_TEST_STOPS";

    /// Whether the child comes to this state within some time; none is that it has ended.
    fn comes_to(child: &mut Child, state: Option<char>) -> bool {
        let file = format!("/proc/{}/stat", child.id());
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            let has_ended = child.try_wait().unwrap().is_some();
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let now = text.rsplit(')').next().and_then(|rest| rest.chars().nth(1));
            if state.map_or(has_ended, |state| now == Some(state)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Runs itself in a process of its own, as that is to be stopped.
    #[test]
    fn one_continue_is_enough_where_the_signal_was_pending() {
        if std::env::var_os(STOPS).is_some() {
            kill(Pid::this(), Signal::SIGTSTP).unwrap();
            stop_by(Signal::SIGTSTP, || true).unwrap();
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "run::raise::tests::one_continue_is_enough_where_the_signal_was_pending"])
            .env(STOPS, "1")
            // A group without a shell outside it would not be stopped.
            .process_group(0);
        // SAFETY: one system call.
        unsafe {
            command.pre_exec(|| Ok(SigSet::from(Signal::SIGTSTP).thread_block()?));
        }
        let mut child = command.spawn().unwrap();
        let stopped = comes_to(&mut child, Some('T'));
        kill(Pid::from_raw(child.id() as i32), Signal::SIGCONT).unwrap();
        let ended = comes_to(&mut child, None);
        child.kill().unwrap();
        assert!(
            child.wait().unwrap().success() && stopped && ended,
            "{stopped} {ended}"
        );
    }
}
