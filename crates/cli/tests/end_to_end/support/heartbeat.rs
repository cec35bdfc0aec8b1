//! How long the machine lets an ordinary thread wait, measured by the tests themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const BEAT: Duration = Duration::from_millis(1);

/// A thread that wants to run once a millisecond, of no other priority than any program.
pub struct Heartbeat {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Heartbeat {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut longest = Duration::ZERO;
            let mut last = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                thread::sleep(BEAT);
                let now = Instant::now();
                longest = longest.max((now - last).saturating_sub(BEAT));
                last = now;
            }
            longest
        });
        Self { stop, thread }
    }

    /// By how much the latest beat was late.
    pub fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the heartbeat")
    }
}
