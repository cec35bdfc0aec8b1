//! How far a program is let go that a user detached (`registration/governor/release.rs`).

use std::sync::atomic::{AtomicU8, Ordering};

const ASKED: u8 = 1;
const HELPER_ENDS: u8 = 2;

/// Goes one way. Relaxed: the governor alone acts on it.
#[derive(Debug, Default)]
pub(crate) struct LetGo(AtomicU8);

impl LetGo {
    /// All of the program is to be brought back, and its helper to end.
    pub(crate) fn ask(&self) {
        self.0.fetch_max(ASKED, Ordering::Relaxed);
    }

    /// Whether that was asked for.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= ASKED
    }

    /// Nothing is out any more, and nothing goes out: the helper is told to end.
    pub(crate) fn end_helper(&self) {
        self.0.fetch_max(HELPER_ENDS, Ordering::Relaxed);
    }

    /// Whether that was done: where no helper is left, nothing is of memfold.
    pub(crate) fn has_ended_helper(&self) -> bool {
        self.0.load(Ordering::Relaxed) == HELPER_ENDS
    }
}
