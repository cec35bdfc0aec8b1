//! How long the machine keeps an ordinary thread waiting, measured by the tests themselves.

use memfold_sys::thread::{allowed_cpus, pin_to};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
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
        let cpus = allowed_cpus();
        let beating = Arc::new(Barrier::new(cpus.len() + 1));
        let beat_on = |cpu| {
            let (stopped, beating) = (Arc::clone(&stop), Arc::clone(&beating));
            thread::spawn(move || {
                pin_to(cpu).expect("an allowed CPU");
                beating.wait();
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
        let threads = cpus.into_iter().map(beat_on).collect();
        // What comes next may keep them from starting.
        beating.wait();
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
