//! Lifecycle of an address space.
//!
//! ```text
//!            hello, fork child's hello           exec, exit               mm released
//! Detached ──────────────────────────► Attached ───────────► Left ────────────────────► Dead
//!     ▲              socket closed         │                   ▲                           ▲
//!     ├────────────────────────────────────┘                   │                           │
//!     └────────────────────────────────────────────────────────┴───────────────────────────┘
//! ```
//!
//! `Attached` to `Detached` is the only step back. Any thread reads and changes the state, with Relaxed
//! accesses: the data that a state announces is published by the gate or by a mutex.

use std::sync::atomic::{AtomicU8, Ordering};

/// A state of [`Life`], in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Phase {
    /// No helper is connected: none connected yet, or its socket closed, as the helper ended, alone or with its program. The
    /// governor probes whether the kernel has released the address space.
    Detached,
    /// The helper's socket is open.
    Attached,
    /// The program exited or executed another one: nothing of it is resident. (Another process may use its memory.)
    Left,
    /// The kernel has released the address space.
    Dead,
}

/// Whether the program was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Kill {
    /// No kill was attempted.
    None,
    /// A kill was attempted, but the PID is not known.
    NotFound,
    /// SIGKILL was sent.
    Sent,
}

/// The phase of an address space, and whether its program was killed.
#[derive(Debug)]
pub(crate) struct Life {
    phase: AtomicU8,
    kill: AtomicU8,
}

impl Default for Life {
    fn default() -> Self {
        Life {
            phase: AtomicU8::new(Phase::Detached as u8),
            kill: AtomicU8::new(Kill::None as u8),
        }
    }
}

impl Life {
    /// The current phase.
    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Detached,
            1 => Phase::Attached,
            2 => Phase::Left,
            _ => Phase::Dead,
        }
    }

    fn change(&self, from: Phase, to: Phase) {
        // If the phase is not `from`, the change does not apply.
        let _ =
            self.phase
                .compare_exchange(from as u8, to as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The helper's socket is open.
    pub(crate) fn attach(&self) {
        self.change(Phase::Detached, Phase::Attached);
    }

    /// The helper's socket closed, or the address space was found gone.
    pub(crate) fn detach(&self) {
        self.change(Phase::Attached, Phase::Detached);
    }

    /// The program exited or executed another one.
    pub(crate) fn leave(&self) {
        self.phase.fetch_max(Phase::Left as u8, Ordering::Relaxed);
    }

    /// The kernel has released the address space.
    pub(crate) fn die(&self) {
        self.phase.fetch_max(Phase::Dead as u8, Ordering::Relaxed);
    }

    /// Notes a kill or a failed attempt. `true` if it is the first of its kind and no kill was sent
    /// before.
    pub(crate) fn note_kill(&self, kill: Kill) -> bool {
        self.kill.fetch_max(kill as u8, Ordering::Relaxed) < kill as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_never_go_back_from_left_or_dead() {
        let life = Life::default();
        assert_eq!(life.phase(), Phase::Detached);
        life.attach();
        assert_eq!(life.phase(), Phase::Attached);
        life.detach();
        assert_eq!(life.phase(), Phase::Detached);
        life.attach();
        life.leave();
        life.detach();
        life.attach();
        assert_eq!(life.phase(), Phase::Left);
        life.die();
        life.leave();
        life.attach();
        assert_eq!(life.phase(), Phase::Dead);
    }

    #[test]
    fn a_kill_is_news_once() {
        let life = Life::default();
        assert!(life.note_kill(Kill::NotFound));
        assert!(!life.note_kill(Kill::NotFound));
        assert!(life.note_kill(Kill::Sent));
        assert!(!life.note_kill(Kill::NotFound));
        assert!(!life.note_kill(Kill::Sent));
    }
}
