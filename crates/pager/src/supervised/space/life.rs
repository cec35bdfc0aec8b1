//! How far an address space is in its life.
//!
//! ```text
//!            hello, fork child's hello           exec, exit               mm released
//! Detached ──────────────────────────► Attached ───────────► Left ────────────────────► Dead
//!     ▲              socket closed         │                   ▲                           ▲
//!     ├────────────────────────────────────┘                   │                           │
//!     └────────────────────────────────────────────────────────┴───────────────────────────┘
//! ```
//!
//! The state never goes back but from `Attached` to `Detached`. It is a hint for all threads but the one
//! that changes it (Relaxed): what a state announces is published by the gate or by a mutex.

use std::sync::atomic::{AtomicU8, Ordering};

/// A state of [`Life`], in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// No helper's socket: none came yet, or it closed. The governor asks the kernel whether the address
    /// space is still there.
    Detached,
    /// The helper's socket is open.
    Attached,
    /// The program exited or executes another one: nothing of it is resident.
    Left,
    /// The kernel has released the address space.
    Dead,
}

/// Whether a kill was sent to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kill {
    /// No.
    None,
    /// It was to be killed, and its process is not known.
    NotFound,
    /// Yes.
    Sent,
}

/// The state of an address space's life, and whether its program was killed.
#[derive(Debug)]
pub struct Life {
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
    /// Where it is now.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Detached,
            1 => Phase::Attached,
            2 => Phase::Left,
            _ => Phase::Dead,
        }
    }

    fn change(&self, from: Phase, to: Phase) {
        // Another state meanwhile is one from which this change does not start.
        let _ =
            self.phase
                .compare_exchange(from as u8, to as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The helper's socket is open.
    pub fn attach(&self) {
        self.change(Phase::Detached, Phase::Attached);
    }

    /// The helper's socket is closed, or its end was seen otherwise.
    pub fn detach(&self) {
        self.change(Phase::Attached, Phase::Detached);
    }

    /// The program exited or executes another one.
    pub fn leave(&self) {
        self.phase.fetch_max(Phase::Left as u8, Ordering::Relaxed);
    }

    /// The kernel has released the address space.
    pub fn die(&self) {
        self.phase.fetch_max(Phase::Dead as u8, Ordering::Relaxed);
    }

    /// Notes a kill, or that it was not possible. `true` if that is new, and no kill was sent before.
    pub fn note_kill(&self, kill: Kill) -> bool {
        self.kill.fetch_max(kill as u8, Ordering::Relaxed) < kill as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_goes_on_and_not_back() {
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
