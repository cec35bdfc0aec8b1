//! An event that a thread of the engine waits for.

use memfold_sys::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const AWAKE: u32 = 0;
const WAITING: u32 = 1;
const SET: u32 = 2;

/// One thread waits, any number set, also in signal handlers.
#[derive(Debug, Default)]
pub(super) struct Event(AtomicU32);

impl Event {
    /// Wakes the waiting thread, or makes its next wait return at once. A load if the event is set.
    pub(super) fn set(&self) {
        // SeqCst: the setting thread stored what it announces before; the waiting thread looks at
        // that after it stored WAITING. One of the two sees the other's store.
        if self.0.load(Ordering::SeqCst) != SET && self.0.swap(SET, Ordering::SeqCst) == WAITING {
            futex::wake(&self.0, 1);
        }
    }

    /// Waits until the event is set, at most for `longest`. Returns at once if it was set since the
    /// last wait.
    pub(super) fn wait(&self, longest: Duration) {
        let unset = self
            .0
            .compare_exchange(AWAKE, WAITING, Ordering::SeqCst, Ordering::SeqCst);
        if unset.is_ok() {
            // The caller looks at what was announced again, whatever the outcome.
            let _ = futex::wait(&self.0, WAITING, Some(longest.as_nanos() as u64));
        }
        self.0.store(AWAKE, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    #[test]
    fn a_set_event_is_never_lost() {
        let event = Arc::new((Event::default(), AtomicBool::new(false)));
        let setter = event.clone();
        let start = Instant::now();
        let thread = std::thread::spawn(move || {
            setter.1.store(true, Ordering::SeqCst);
            setter.0.set();
        });
        while !event.1.load(Ordering::SeqCst) {
            event.0.wait(Duration::from_secs(60));
        }
        thread.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
