//! Whether programs are served, start or grow without a helper, by which the governor sees that it may look less often.

use memfold_sys::alarm::Alarm;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set by the handlers, and where programs come or grow; taken by the governor. The flag is a hint: its accesses are Relaxed.
#[derive(Default)]
pub(crate) struct Activity {
    seen: AtomicBool,
    /// For the governor, which waits.
    alarm: Alarm,
}

impl Activity {
    /// A program's messages are about to be read, or what the governor samples has grown.
    pub(crate) fn note(&self) {
        if !self.seen.load(Ordering::Relaxed) {
            self.seen.store(true, Ordering::Relaxed);
            self.alarm.ring();
        }
    }

    /// Whether any were since the last call.
    pub(crate) fn take(&self) -> bool {
        self.seen.swap(false, Ordering::Relaxed)
    }

    /// Whether [`Activity::take`] would say so.
    pub(crate) fn is_any(&self) -> bool {
        self.seen.load(Ordering::Relaxed)
    }

    /// What the governor waits for.
    pub(crate) fn alarm(&self) -> &Alarm {
        &self.alarm
    }
}
