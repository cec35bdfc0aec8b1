//! A signal that memfold received.

use nix::sys::signal::Signal;

/// A signal, and where it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Which.
    pub signal: Signal,
    /// The terminal sent it, to the whole process group: the program has it already. (Or the kernel, for memfold alone.)
    /// False as long as there is no program.
    pub by_terminal: bool,
    /// It was ignored when memfold was started (as by `nohup`). Blocked signals come nevertheless.
    pub was_ignored: bool,
}

impl Received {
    /// Whether it asks a run to end.
    pub fn asks_to_end(self) -> bool {
        use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
        matches!(self.signal, SIGHUP | SIGINT | SIGQUIT | SIGTERM) && !self.was_ignored
    }

    /// Whether it stops what does not handle it.
    pub fn stops(self) -> bool {
        use Signal::{SIGTSTP, SIGTTIN, SIGTTOU};
        matches!(self.signal, SIGTSTP | SIGTTIN | SIGTTOU)
    }
}
