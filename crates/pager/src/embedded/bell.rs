//! A bell that wakes a thread of the engine; may be rung in a signal handler.

use memfold_sys::futex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
const RUNG: u32 = 2;

/// One thread sleeps, any number ring.
#[derive(Debug, Default)]
pub struct Bell(AtomicU32);

impl Bell {
    /// Wakes the thread, or keeps it from falling asleep next. A load if it was rung already.
    pub fn ring(&self) {
        // The one who rings wrote its wish before: SeqCst against the sleeper's look at it.
        if self.0.load(Ordering::SeqCst) != RUNG && self.0.swap(RUNG, Ordering::SeqCst) == ASLEEP {
            futex::wake(&self.0, 1);
        }
    }

    /// Sleeps until the bell is rung, at most `longest`; not at all if it was since the last sleep.
    pub fn sleep(&self, longest: Duration) {
        let falling = self
            .0
            .compare_exchange(AWAKE, ASLEEP, Ordering::SeqCst, Ordering::SeqCst);
        if falling.is_ok() {
            // Any outcome is one to wake up by.
            let _ = futex::wait(&self.0, ASLEEP, Some(longest.as_nanos() as u64));
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
    fn a_ring_is_never_lost() {
        let bell = Arc::new((Bell::default(), AtomicBool::new(false)));
        let ringer = bell.clone();
        let start = Instant::now();
        let thread = std::thread::spawn(move || {
            ringer.1.store(true, Ordering::SeqCst);
            ringer.0.ring();
        });
        while !bell.1.load(Ordering::SeqCst) {
            bell.0.sleep(Duration::from_secs(60));
        }
        thread.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
