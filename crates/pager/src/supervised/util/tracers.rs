//! Tracers whose pages reclaim spares for a while; `space/stopped.rs` explains why.

use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicU64, Ordering};

/// PIDs of spared tracers, each with an end time in milliseconds since the supervisor's start. Any
/// thread uses it. A reused PID spares the wrong program until the end time, which costs only room.
#[derive(Debug, Default)]
pub(crate) struct SparedTracers {
    spared: Mutex<Vec<(i32, u64)>>,
    /// The latest end time, Relaxed: lets faults skip the lock where no tracer is spared.
    latest: AtomicU64,
}

impl SparedTracers {
    /// Spares a tracer until the time `until`.
    pub(crate) fn spare(&self, pid: i32, until: u64) {
        let mut spared = lock(&self.spared);
        spared.retain(|(other, end)| *other != pid && *end + 1000 > until);
        spared.push((pid, until));
        self.latest.fetch_max(until, Ordering::Relaxed);
    }

    /// Whether any tracer is spared now.
    pub(crate) fn spares_any(&self, now: u64) -> bool {
        now < self.latest.load(Ordering::Relaxed)
    }

    /// Whether the process `pid` is spared now.
    pub(crate) fn spares(&self, pid: i32, now: u64) -> bool {
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
