//! How far a program is let go that a user detached (`registration/governor/release.rs`).

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const ASKED: u8 = 1;
const HELPER_ENDS: u8 = 2;

/// Goes one way. Relaxed: the governor alone acts on it.
#[derive(Debug, Default)]
pub(crate) struct LetGo {
    stage: AtomicU8,
    with_children: AtomicBool,
}

impl LetGo {
    /// All of the program is to be brought back, and its helper to end.
    ///
    /// `with_children`: what it forks from now on as well, as nothing of the library's runs in its children. Where
    /// something does, a child starts a helper of its own, which relies on being known here, and ends otherwise.
    pub(crate) fn ask(&self, with_children: bool) {
        self.with_children
            .fetch_or(with_children, Ordering::Relaxed);
        self.stage.fetch_max(ASKED, Ordering::Relaxed);
    }

    /// Whether that was asked for.
    pub(crate) fn is_asked(&self) -> bool {
        self.stage.load(Ordering::Relaxed) >= ASKED
    }

    /// Whether that goes for the children that it forks, too.
    pub(crate) fn is_asked_with_children(&self) -> bool {
        self.is_asked() && self.with_children.load(Ordering::Relaxed)
    }

    /// Nothing is out any more, and nothing goes out: the helper is told to end.
    pub(crate) fn end_helper(&self) {
        self.stage.fetch_max(HELPER_ENDS, Ordering::Relaxed);
    }

    /// Whether that was done: where no helper is left, nothing is of memfold.
    pub(crate) fn has_ended_helper(&self) -> bool {
        self.stage.load(Ordering::Relaxed) == HELPER_ENDS
    }
}
