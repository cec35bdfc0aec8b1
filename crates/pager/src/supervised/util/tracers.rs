//! Tracers that reclaim spares for a while: see `space/stopped.rs`.

use crate::sync::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// PIDs of tracers, each with the time until which it is spared, in milliseconds since the supervisor
/// started. A PID that is used anew meanwhile spares another program for that while, which costs room
/// and nothing else.
#[derive(Debug, Default)]
pub struct SparedTracers {
    spared: Mutex<Vec<(i32, u64)>>,
    /// The latest of the times: spares faults the lock where no tracer is spared.
    latest: AtomicU64,
}

impl SparedTracers {
    /// Spares a tracer until then.
    pub fn spare(&self, pid: i32, until: u64) {
        let mut spared = lock(&self.spared);
        spared.retain(|(other, end)| *other != pid && *end + 1000 > until);
        spared.push((pid, until));
        self.latest.fetch_max(until, Ordering::Relaxed);
    }

    /// Whether any tracer is spared now.
    pub fn spares_any(&self, now: u64) -> bool {
        now < self.latest.load(Ordering::Relaxed)
    }

    /// Whether this one is.
    pub fn spares(&self, pid: i32, now: u64) -> bool {
        let spared = lock(&self.spared);
        spared
            .iter()
            .any(|(tracer, until)| *tracer == pid && now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracer_is_spared_until_its_time() {
        let tracers = SparedTracers::default();
        assert!(!tracers.spares_any(0));
        tracers.spare(7, 100);
        tracers.spare(8, 50);
        assert!(tracers.spares(7, 99) && !tracers.spares(7, 100));
        assert!(tracers.spares(8, 49) && !tracers.spares(8, 50));
        assert!(!tracers.spares(9, 0) && tracers.spares_any(99) && !tracers.spares_any(100));
        tracers.spare(7, 5000);
        assert!(tracers.spares(7, 4999) && lock(&tracers.spared).len() == 1);
    }
}
