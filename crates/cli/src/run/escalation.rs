//! A run that is asked to end a second time ends, whatever state it is in.

use super::raise::die_by;
use super::received::Received;
use crate::sync::lock;
use memfold_sys::process::{self, Process};
use memfold_sys::thread;
use nix::sys::signal::Signal;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Two signals closer together than this are one wish (`timeout` sends it twice, for instance).
pub const SAME_REQUEST: Duration = Duration::from_millis(100);
/// How long memfold may take to end by itself once its programs were killed.
const LONGEST_END: Duration = Duration::from_secs(5);
/// How long processes that start others meanwhile are killed again and again.
const LONGEST_KILL: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
struct State {
    /// The first wish, and when it came.
    first: Option<(Signal, Instant)>,
    /// The signal that ends the run, and when memfold must be gone.
    last: Option<(Signal, Instant)>,
    program_ended: bool,
    /// No signal ends anything.
    disabled: bool,
    /// `end_programs` is over.
    killed: bool,
}

/// What the thread that takes signals and the one that follows the run know of it. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct Escalation(Arc<Mutex<State>>);

impl Escalation {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// From now on no number of signals ends memfold: a program that is no child of it would end with it.
    pub fn disable(&self) {
        self.state().disabled = true;
    }

    /// The program has ended: signals are for what it left behind from now on, beginning anew.
    pub fn program_ended(&self) {
        let mut state = self.state();
        state.program_ended = true;
        state.first = None;
    }

    /// The signal by which the run was ended, if it was. Waits until the programs are killed: memfold must
    /// not leave those behind that it could not reach at once.
    pub fn ended_by(&self) -> Option<Signal> {
        loop {
            let state = self.state();
            let (signal, deadline) = state.last?;
            if state.killed || Instant::now() >= deadline {
                return Some(signal);
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// When memfold must be gone.
    pub fn deadline(&self) -> Option<Instant> {
        self.state().last.map(|(_, deadline)| deadline)
    }

    /// Whether this signal is the second that asks the run to end.
    ///
    /// While the program lives, what the terminal sends is for the program alone, and so is one
    /// SIGINT after the other: interactive programs are interrupted again and again.
    pub fn is_last(&self, received: Received) -> bool {
        use Signal::{SIGINT, SIGTERM};
        let mut state = self.state();
        let asks_to_end = matches!(received.signal, SIGINT | SIGTERM)
            && !received.was_ignored
            && (state.program_ended || !received.by_terminal);
        if !asks_to_end || state.disabled || state.last.is_some() {
            return false;
        }
        let Some((first, since)) = state.first else {
            state.first = Some((received.signal, Instant::now()));
            return false;
        };
        if since.elapsed() <= SAME_REQUEST {
            return false;
        }
        if !state.program_ended && (first, received.signal) == (SIGINT, SIGINT) {
            return false;
        }
        state.last = Some((received.signal, Instant::now() + LONGEST_END));
        true
    }

    /// Kills the program and all below it. What the program left behind when it ended is for the
    /// thread that follows the run, which knows what memfold holds.
    pub fn end_programs(&self) {
        if !self.state().program_ended {
            // The scope ends with the thread. It cannot be started only where there is no memory for it.
            std::thread::scope(|scope| {
                let killer = std::thread::Builder::new().name("killer".to_owned());
                if killer.spawn_scoped(scope, kill_all_apart).is_err() {
                    kill_all_below();
                }
            });
        }
        self.state().killed = true;
    }

    /// Ends this process by the signal if it should be gone by now.
    pub fn die_in_time(&self) {
        let Some((signal, deadline)) = self.state().last else {
            return;
        };
        if Instant::now() >= deadline {
            die_by(signal as i32);
            std::process::exit(128 + signal as i32);
        }
    }
}

/// Without a descriptor no process can be listed or opened, and other threads may have taken all; so the calling
/// one leaves their table, and has its own from now on.
fn kill_all_apart() {
    if let Err(error) = thread::keep_only(std::io::stderr().as_fd()) {
        log::debug!("descriptors stay shared: {error}");
    }
    kill_all_below();
}

fn kill_all_below() {
    // Processes can be listed, if there are any.
    let can_look = || File::open("/proc/self/stat").is_ok();
    let began = Instant::now();
    while began.elapsed() < LONGEST_KILL {
        let below = process::below(process::own_id());
        let living = below
            .into_iter()
            .filter(|pid| process::living_since(*pid).is_some());
        let living: Vec<i32> = living.collect();
        if living.is_empty() && can_look() {
            return;
        }
        for pid in living {
            signal_below(pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to a process below this one, and to no other that has its PID by then.
pub fn signal_below(pid: i32, signal: Signal) {
    // Fails where it is gone, as does what is sent to one that has ended.
    if let Ok(process) = Process::open(pid)
        && process.descends_from_here().unwrap_or(false)
    {
        let _ = process.signal(signal as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Signal::{SIGHUP, SIGINT, SIGTERM};

    fn sent(signal: Signal) -> Received {
        Received {
            signal,
            by_terminal: false,
            was_ignored: false,
        }
    }

    /// Whether the second of two signals ends a run, the first of which came a second ago.
    fn ends(first: Received, second: Received, program_ended: bool) -> bool {
        let escalation = Escalation::default();
        if program_ended {
            escalation.program_ended();
        }
        assert!(!escalation.is_last(first));
        assert!(!escalation.is_last(second), "one wish");
        if let Some((_, since)) = &mut escalation.state().first {
            *since -= Duration::from_secs(1);
        }
        escalation.is_last(second)
    }

    #[test]
    fn a_second_wish_to_end_is_told_from_interrupts() {
        let by_terminal = Received {
            by_terminal: true,
            ..sent(SIGINT)
        };
        let ignored = Received {
            was_ignored: true,
            ..sent(SIGTERM)
        };
        for (first, second, while_running, afterwards) in [
            (sent(SIGTERM), sent(SIGTERM), true, true),
            (sent(SIGINT), sent(SIGTERM), true, true),
            (sent(SIGTERM), sent(SIGINT), true, true),
            (sent(SIGINT), sent(SIGINT), false, true),
            (by_terminal, by_terminal, false, true),
            (sent(SIGHUP), sent(SIGHUP), false, false),
            (ignored, ignored, false, false),
        ] {
            assert_eq!(
                ends(first, second, false),
                while_running,
                "{first:?} {second:?}"
            );
            assert_eq!(
                ends(first, second, true),
                afterwards,
                "{first:?} {second:?}"
            );
        }
    }
}
