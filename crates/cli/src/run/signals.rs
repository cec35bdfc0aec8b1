//! Signals, taken from a descriptor instead of handlers.
//!
//! The program stays in memfold's process group, so what the terminal sends (Ctrl-C, Ctrl-Z, a
//! new window size) reaches it without memfold, which must only not die of it first. What is sent
//! to memfold itself is passed on, and so is what the terminal sent before there was a program, unless
//! that ends the run. A thread takes it in, so that it is seen whatever the rest of memfold waits for.

use super::escalation::Escalation;
use super::received::Received;
use crate::sync::lock;
use memfold_sys::inherited::{set_ignored, was_ignored};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::process::{getpid, getsid};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
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
/// lost, by timers that were set before memfold was executed, and what the terminal sends while there is no program. Others
/// of its signals the terminal sends to the program, too, or they are about memfold's own CPU time.
fn is_for_program(signal: Signal, has_program: bool) -> bool {
    use Signal::{
        SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTSTP, SIGVTALRM, SIGWINCH,
    };
    let leads_session = || getsid(None).is_ok_and(|session| session == getpid());
    match signal {
        SIGALRM | SIGPROF | SIGVTALRM => true,
        SIGHUP | SIGCONT => !has_program || leads_session(),
        SIGINT | SIGQUIT | SIGTSTP | SIGWINCH => !has_program,
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
    taker: Arc<Taker>,
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
        let queue = Queue {
            received: Mutex::default(),
            arrived: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        let taker = Arc::new(Taker {
            source,
            queue,
            escalation: Escalation::default(),
            has_program: AtomicBool::new(false),
        });
        let running = taker.clone();
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || running.run())?;
        Ok(Signals {
            children: SignalFd::with_flags(&children, flags)?,
            taker,
            original,
        })
    }

    /// Before the program is started: the signal that asks the run to end, if one has come.
    pub fn asks_to_end(&self) -> Option<Signal> {
        self.taker.take_all();
        let received = self.taker.queue.received();
        let asks = received.iter().find(|one| one.asks_to_end())?;
        Some(asks.signal)
    }

    /// The program exists: what the terminal sends reaches it without memfold. One signal that came after the fork may
    /// be passed on all the same, to a program that has installed no handler yet.
    pub fn program_started(&self) {
        self.taker.take_all();
        self.taker.has_program.store(true, Ordering::Relaxed);
    }

    /// What becomes of the run when it is asked to end a second time.
    pub fn escalation(&self) -> &Escalation {
        &self.taker.escalation
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
        [self.children.as_fd(), self.taker.queue.arrived.as_fd()]
    }

    /// The next signal, if one has come. The ends of children are none: they have only to be waited for.
    pub fn next(&self) -> Option<Received> {
        while let Ok(Some(_)) = self.children.read_signal() {}
        let mut count = [0; 8];
        // Fails if nothing has come.
        let _ = rustix::io::read(&self.taker.queue.arrived, &mut count);
        self.taker.queue.received().pop_front()
    }

    /// Forgets the stop signals that have come: memfold was stopped and continued since, as were the programs, which
    /// they would stop once more.
    pub fn forget_stops(&self) {
        self.taker.queue.received().retain(|one| !one.stops());
    }
}

impl Queue {
    fn received(&self) -> MutexGuard<'_, VecDeque<Received>> {
        lock(&self.received)
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
#[derive(Debug)]
struct Taker {
    source: SignalFd,
    queue: Queue,
    escalation: Escalation,
    /// There is a program, which the terminal's signals reach. Relaxed: a flag alone.
    has_program: AtomicBool,
}

impl Taker {
    fn run(&self) {
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
            self.take_all();
            self.escalation.die_in_time();
        }
    }

    /// Takes all that has come. Any thread may.
    fn take_all(&self) {
        while let Some(ends_run) = self.take() {
            if ends_run {
                self.escalation.end_programs();
            }
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
                by_terminal: info.ssi_code == SI_KERNEL
                    && !is_for_program(signal, self.has_program.load(Ordering::Relaxed)),
                was_ignored: was_ignored(signal as i32),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_terminals_signals_are_memfolds_until_there_is_a_program() {
        for signal in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTSTP] {
            assert!(is_for_program(signal, false) && !is_for_program(signal, true));
        }
        assert!(
            !is_for_program(Signal::SIGXCPU, false),
            "memfold's own CPU time"
        );
    }

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
