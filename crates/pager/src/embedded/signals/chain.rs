//! The handlers of the program that faults on no region are passed on to.
//!
//! Each time that memfold's handler is put above others it has another function, a *level*, and keeps what it was put above.
//! A fault that is not memfold's goes from a level to the handler below it. Where that passes it on in turn, by a call, or by
//! restoring what was installed before it and raising the signal or having the access made again, it comes to the level
//! below: so it never goes round in circles.

use memfold_sys::signal::{self, Info, Previous};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Levels there are. What a program installs more often than this stays above memfold's.
pub(super) const LEVELS: usize = 8;

/// The handlers of a signal.
pub(super) struct Chain {
    /// What was installed before each level; null or leaked. (A child may have been forked in the midst of a `OnceLock`'s
    /// change.)
    below: [AtomicPtr<Previous>; LEVELS],
    /// Whether a signal that a handler raised was taken for one that it passes on, and no fault was served since.
    raised: AtomicBool,
}

impl Chain {
    pub(super) const fn new() -> Self {
        Self {
            below: [const { AtomicPtr::new(ptr::null_mut()) }; LEVELS],
            raised: AtomicBool::new(false),
        }
    }

    fn below(&self, level: usize) -> Option<&'static Previous> {
        // SAFETY: null, or leaked by `keep`.
        unsafe { self.below[level].load(Ordering::Acquire).as_ref() }
    }

    /// Levels that were installed in this process, or in one that it was forked from.
    pub(super) fn levels(&self) -> usize {
        (0..LEVELS)
            .take_while(|level| self.below(*level).is_some())
            .count()
    }

    /// The level that was put above a handler like this before.
    pub(super) fn level_above(&self, handler: usize) -> Option<usize> {
        let is_it = |level: &usize| self.below(*level).is_some_and(|one| one.is(handler));
        (0..LEVELS).find(is_it)
    }

    /// Keeps what was installed before a level, if it is the first time. Where the same was found before, it is one that the
    /// program has installed anew.
    pub(super) fn keep(&self, level: usize, found: Previous) {
        let found = Box::into_raw(Box::new(found));
        let set = self.below[level].compare_exchange(
            ptr::null_mut(),
            found,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if set.is_err() {
            // SAFETY: made above, and not published.
            let found = unsafe { Box::from_raw(found) };
            if let Some(kept) = self.below(level) {
                kept.note_found_again(&found);
            }
        }
    }

    /// A fault was served.
    pub(super) fn note_served(&self) {
        if self.raised.load(Ordering::Relaxed) {
            self.raised.store(false, Ordering::Relaxed);
        }
    }

    /// Has the handler below a level called.
    ///
    /// Where a handler above the highest level has raised the signal, a fault on a region may have gone there: the first
    /// time, nothing is done. The access is made again when that handler has returned, and is served, or comes here as a
    /// fault of the program. (Those below a level are called for what is the program's alone.)
    ///
    /// # Safety
    /// The arguments are what the kernel gave the handler of that level.
    pub(super) unsafe fn pass_on(
        &self,
        level: usize,
        (signal, info, context): (i32, *mut Info, *mut libc::c_void),
    ) {
        // SAFETY: the caller's promise.
        let is_raised = unsafe { signal::is_raised_by_handler(info, context) };
        let is_highest = level + 1 == self.levels();
        if is_raised && is_highest && !self.raised.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(below) = self.below(level) {
            // SAFETY: as above.
            unsafe { below.call(signal, info, context) };
        }
    }
}
