//! Signals, taken from a descriptor instead of handlers.
//!
//! The program stays in memfold's process group, so what the terminal sends (Ctrl-C, Ctrl-Z, a
//! new window size) reaches it without memfold, which must only not die of it first. What is sent
//! to memfold itself is passed on. A thread takes it in, so that it is seen whatever the rest of
//! memfold waits for.

use super::escalation::Escalation;
use super::received::Received;
use memfold_sys::inherited::{set_ignored, was_ignored};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{getpid, getsid};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// All that end, stop or notify a process and can be caught, but for those that a fault of memfold's own
/// raises.
const PASSED_ON: [Signal; 18] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGTERM,
    Signal::SIGCONT,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
    Signal::SIGURG,
    Signal::SIGXCPU,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGWINCH,
    Signal::SIGIO,
    Signal::SIGPWR,
];

/// What memfold needs to have an action of its own, and whether that is to ignore it. Ended children
/// would leave no status if their signal was ignored; where a file is limited, writing is to fail
/// instead of ending memfold.
const OWN_ACTIONS: [(Signal, bool); 2] = [(Signal::SIGCHLD, false), (Signal::SIGXFSZ, true)];

/// `si_code` of what the kernel itself sends.
const SI_KERNEL: i32 = 0x80;
/// Of what memfold's own timer sends, which continues memfold alone.
const SI_TIMER: i32 = -2;

/// Whether the kernel sends a signal to memfold alone, in the program's place: to the leader of a session whose terminal is
/// lost, and by timers that were set before memfold was executed. Others of its signals the terminal sends to the program,
/// too, or they are about memfold's own CPU time.
fn is_for_program(signal: Signal) -> bool {
    use Signal::{SIGALRM, SIGCONT, SIGHUP, SIGPROF, SIGVTALRM};
    match signal {
        SIGALRM | SIGPROF | SIGVTALRM => true,
        SIGHUP | SIGCONT => getsid(None).is_ok_and(|session| session == getpid()),
        _ => false,
    }
}

/// Signals that came and were not taken yet.
#[derive(Debug)]
struct Queue {
    received: Mutex<VecDeque<Received>>,
    arrived: OwnedFd,
}

/// The blocked signals and the descriptors that report them.
#[derive(Debug)]
pub struct Signals {
    children: SignalFd,
    queue: Arc<Queue>,
    escalation: Escalation,
    original: SigSet,
}

impl Signals {
    /// Blocks them in this thread and those it starts from now on.
    pub fn block() -> io::Result<Signals> {
        for (signal, ignored) in OWN_ACTIONS {
            set_ignored(signal as i32, ignored)?;
        }
        let passed_on: SigSet = PASSED_ON.into_iter().collect();
        let children = SigSet::from(Signal::SIGCHLD);
        let all = passed_on.iter().chain(&children).collect::<SigSet>();
        let original = all.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let source = SignalFd::with_flags(&passed_on, flags)?;
        let queue = Arc::new(Queue {
            received: Mutex::default(),
            arrived: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let escalation = Escalation::default();
        let taker = Taker {
            source,
            queue: queue.clone(),
            escalation: escalation.clone(),
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || taker.run())?;
        Ok(Signals {
            children: SignalFd::with_flags(&children, flags)?,
            queue,
            escalation,
            original,
        })
    }

    /// What becomes of the run when it is asked to end a second time.
    pub fn escalation(&self) -> &Escalation {
        &self.escalation
    }

    /// The mask as memfold found it: the program's.
    pub fn original(&self) -> SigSet {
        self.original
    }

    /// Ignores what was ignored when memfold was started, and nothing else: for the program, between
    /// fork and exec.
    pub fn restore_actions() -> io::Result<()> {
        // Rust's runtime ignores SIGPIPE and has its children not ignore it.
        let own = OWN_ACTIONS.map(|(signal, _)| signal);
        for signal in own.into_iter().chain([Signal::SIGPIPE]) {
            set_ignored(signal as i32, was_ignored(signal as i32))?;
        }
        Ok(())
    }

    /// To wait for signals and the ends of children.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.children.as_fd(), self.queue.arrived.as_fd()]
    }

    /// The next signal, if one has come. The ends of children are none: they have only to be waited for.
    pub fn next(&self) -> Option<Received> {
        while let Ok(Some(_)) = self.children.read_signal() {}
        let mut count = [0; 8];
        // Fails if nothing has come.
        let _ = rustix::io::read(&self.queue.arrived, &mut count);
        self.queue.received().pop_front()
    }

    /// Forgets the stop signals that have come: memfold was stopped and continued since, as were the programs, which
    /// they would stop once more.
    pub fn forget_stops(&self) {
        self.queue.received().retain(|one| !one.stops());
    }
}

impl Queue {
    fn received(&self) -> std::sync::MutexGuard<'_, VecDeque<Received>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the next signal of a source. The lock is held meanwhile: none is in between when stops are forgotten.
    fn take(&self, next: impl FnOnce() -> Option<Received>) -> Option<()> {
        let mut queue = self.received();
        let received = next()?;
        if received.signal == Signal::SIGCONT {
            // As the kernel discards those that are pending.
            queue.retain(|one| !one.stops());
        }
        queue.push_back(received);
        drop(queue);
        // Fails only if the counter is full, and then no thread waits.
        let _ = rustix::io::write(&self.arrived, &1_u64.to_ne_bytes());
        Some(())
    }
}

/// Takes signals in.
struct Taker {
    source: SignalFd,
    queue: Arc<Queue>,
    escalation: Escalation,
}

impl Taker {
    fn run(self) {
        loop {
            let mut sources = [PollFd::from_borrowed_fd(self.source.as_fd(), PollFlags::IN)];
            let rest = self
                .escalation
                .deadline()
                .map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let rest = rest.map(|rest| Timespec {
                tv_sec: rest.as_secs() as i64,
                tv_nsec: i64::from(rest.subsec_nanos()),
            });
            // An interruption only means to look sooner.
            let _ = poll(&mut sources, rest.as_ref());
            while let Some(ends_run) = self.take() {
                if ends_run {
                    self.escalation.end_programs();
                }
            }
            self.escalation.die_in_time();
        }
    }

    /// Puts the next signal into the queue, if one has come. Returns whether it ends the run.
    fn take(&self) -> Option<bool> {
        let mut ends_run = false;
        self.queue.take(|| {
            let received = self.next()?;
            // Before it can be seen in the queue.
            ends_run = self.escalation.is_last(received);
            Some(received)
        })?;
        Some(ends_run)
    }

    fn next(&self) -> Option<Received> {
        loop {
            let info = self.source.read_signal().ok().flatten()?;
            if info.ssi_code == SI_TIMER {
                continue;
            }
            let Ok(signal) = Signal::try_from(info.ssi_signo as i32) else {
                continue;
            };
            return Some(Received {
                signal,
                by_terminal: info.ssi_code == SI_KERNEL && !is_for_program(signal),
                was_ignored: was_ignored(signal as i32),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_continue_discards_stops_that_were_not_taken() {
        let queue = Queue {
            received: Mutex::default(),
            arrived: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        };
        let send = |signal| {
            queue.take(|| {
                Some(Received {
                    signal,
                    by_terminal: false,
                    was_ignored: false,
                })
            })
        };
        let sent = [
            Signal::SIGTSTP,
            Signal::SIGTERM,
            Signal::SIGTTIN,
            Signal::SIGCONT,
            Signal::SIGTSTP,
        ];
        for signal in sent {
            send(signal).unwrap();
        }
        let left: Vec<Signal> = queue.received().iter().map(|one| one.signal).collect();
        assert_eq!(left, [Signal::SIGTERM, Signal::SIGCONT, Signal::SIGTSTP]);
    }
}
