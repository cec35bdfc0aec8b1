//! How long the machine keeps an ordinary thread waiting, measured by the tests themselves.

use memfold_sys::thread::{allowed_cpus, pin_to};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const BEAT: Duration = Duration::from_millis(1);

/// A thread on each CPU that wants to run once a millisecond, at the priority of any program. A host that
/// takes one virtual CPU away stops what runs there, and no thread of another CPU notices.
pub struct Heartbeat {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Duration>>,
}

impl Heartbeat {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let beat_on = |cpu| {
            let stopped = Arc::clone(&stop);
            thread::spawn(move || {
                pin_to(cpu).expect("an allowed CPU");
                let mut longest = Duration::ZERO;
                let mut last = Instant::now();
                while !stopped.load(Ordering::Relaxed) {
                    thread::sleep(BEAT);
                    let now = Instant::now();
                    longest = longest.max((now - last).saturating_sub(BEAT));
                    last = now;
                }
                longest
            })
        };
        let threads = allowed_cpus().into_iter().map(beat_on).collect();
        Self { stop, threads }
    }

    /// By how much the latest beat of any CPU was late.
    pub fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let late = self
            .threads
            .into_iter()
            .map(|thread| thread.join().expect("the heartbeat"));
        late.max().unwrap_or_default()
    }
}
