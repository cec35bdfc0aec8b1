//! The handlers of the program that faults on no region are passed on to.

use memfold_sys::signal::{self, Info, Previous};
use memfold_sys::thread;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// The handlers of a signal.
pub(super) struct Chain {
    /// What was installed before this one first was.
    first: OnceLock<Previous>,
    /// What the program has installed since, and this one was put above. Never freed: a thread may be calling it.
    later: AtomicPtr<Previous>,
    /// The thread that calls `later`, and where on its stack; 0 for none.
    calling: AtomicU32,
    frame: AtomicUsize,
    /// Whether a signal that a handler raised was taken for one that it passes on, and no fault was served since.
    raised: AtomicBool,
}

impl Chain {
    pub(super) const fn new() -> Self {
        Self {
            first: OnceLock::new(),
            later: AtomicPtr::new(ptr::null_mut()),
            calling: AtomicU32::new(0),
            frame: AtomicUsize::new(0),
            raised: AtomicBool::new(false),
        }
    }

    /// Whether the handler was installed in this process, or in one that it was forked from.
    pub(super) fn is_begun(&self) -> bool {
        self.first.get().is_some()
    }

    /// Keeps what was installed before, if it is the first.
    pub(super) fn begin(&self, found: Previous) {
        let _ = self.first.set(found);
    }

    /// Keeps a handler that this one was put above.
    pub(super) fn put_above(&self, found: Previous) {
        if !found.is_no_handler() {
            self.later
                .store(Box::into_raw(Box::new(found)), Ordering::Release);
        }
    }

    /// A fault was served.
    pub(super) fn note_served(&self) {
        if self.raised.load(Ordering::Relaxed) {
            self.raised.store(false, Ordering::Relaxed);
        }
    }

    /// Has the program's handlers called, the one that was installed last first. One of them may have this one called
    /// again, as what was installed before it: by a call, or by restoring it and raising the signal.
    ///
    /// Where the signal was raised in a handler that this one has not called, that handler stands above this one, and a
    /// fault on a region may have gone there: the first time, nothing is done. The access is made again when the handler
    /// has returned, and either is served, or comes here as a fault of the program.
    ///
    /// # Safety
    /// The arguments are what the kernel gave a handler.
    pub(super) unsafe fn pass_on(&self, signal: i32, info: *mut Info, context: *mut libc::c_void) {
        let here = ptr::from_ref(&signal) as usize;
        let own = thread::current_id();
        let calls = self.calling.load(Ordering::Relaxed) == own;
        // After a jump out of the handler, another signal is not below it on the stack.
        let is_called_again = calls && here < self.frame.load(Ordering::Relaxed);
        // SAFETY: the caller's promise.
        let is_raised = unsafe { signal::is_raised_by_handler(info, context) };
        if is_raised && !is_called_again && !self.raised.swap(true, Ordering::Relaxed) {
            return;
        }
        // SAFETY: null, or from `Box::into_raw` in `put_above`, whose store this load acquires; never freed.
        let later = unsafe { self.later.load(Ordering::Acquire).as_ref() };
        if let Some(later) = later
            && !is_called_again
        {
            let is_noted = calls
                || self
                    .calling
                    .compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if is_noted {
                self.frame.store(here, Ordering::Relaxed);
            }
            // SAFETY: the caller's promise.
            unsafe { later.call(signal, info, context) };
            if is_noted {
                self.calling.store(0, Ordering::Relaxed);
            }
        } else if let Some(first) = self.first.get() {
            // SAFETY: as above.
            unsafe { first.call(signal, info, context) };
        }
    }
}
