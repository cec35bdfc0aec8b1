//! Signals, taken from a descriptor instead of handlers.
//!
//! The program stays in memfold's process group, so what the terminal sends (Ctrl-C, Ctrl-Z, a
//! new window size) reaches it without memfold, which must only not die of it first. What is sent
//! to memfold itself is passed on.

use memfold_sys::inherited::{set_ignored, was_ignored};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, raise, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// All that end, stop or tell a process something and can be caught. Not among them: those that
/// a fault of memfold's own raises.
const PASSED_ON: [Signal; 17] = [
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

/// `si_code` of what the kernel itself sends, the terminal's signals among it.
const SI_KERNEL: i32 = 0x80;

/// A signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Which.
    pub signal: Signal,
    /// The terminal sent it, to the whole process group: the program has it already.
    pub by_terminal: bool,
    /// It was ignored when memfold was started (as by `nohup`). Blocked signals come nevertheless.
    pub was_ignored: bool,
}

/// The blocked signals and the descriptor they come from.
#[derive(Debug)]
pub struct Signals {
    descriptor: SignalFd,
    original: SigSet,
}

impl Signals {
    /// Blocks them in this thread and those it starts from now on.
    pub fn block() -> io::Result<Signals> {
        for (signal, ignored) in OWN_ACTIONS {
            set_ignored(signal as i32, ignored)?;
        }
        let mut set: SigSet = PASSED_ON.into_iter().collect();
        set.add(Signal::SIGCHLD);
        let original = set.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Signals {
            descriptor: SignalFd::with_flags(&set, flags)?,
            original,
        })
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

    /// To wait for signals.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// The next signal, if one has come.
    pub fn next(&self) -> Option<Received> {
        loop {
            let info = self.descriptor.read_signal().ok().flatten()?;
            let Ok(signal) = Signal::try_from(info.ssi_signo as i32) else {
                continue;
            };
            return Some(Received {
                signal,
                by_terminal: info.ssi_code == SI_KERNEL,
                was_ignored: was_ignored(signal as i32),
            });
        }
    }
}

/// Stops this process as `signal` does, until it is continued.
pub fn stop_by(signal: Signal) -> nix::Result<()> {
    let set = SigSet::from(signal);
    set.thread_unblock()?;
    let raised = raise(signal);
    set.thread_block()?;
    raised
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
