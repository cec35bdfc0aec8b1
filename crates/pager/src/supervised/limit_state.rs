//! The limit in force, which may be changed while programs run, and whether it is kept.

use crate::options::Limit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// No limit.
const NONE: u64 = u64::MAX;
/// Time that a lowered limit has to be reached, before what is above it counts as excess.
const SETTLING: Duration = Duration::from_secs(10);

/// Excess over a limit that is not reported: the larger of a part of it and of a number of bytes. Larger
/// values hide more.
const TOLERATED_DIVISOR: u64 = 32;
const TOLERATED_BYTES: u64 = 4 << 20;

/// Bytes by which a limit may be exceeded and still counts as kept.
pub(crate) fn tolerance(limit: u64) -> u64 {
    (limit / TOLERATED_DIVISOR).max(TOLERATED_BYTES)
}

/// The limit of a group. Any thread reads it, and commands change it; all accesses are Relaxed, as a reader
/// that sees one number of the old limit and one of the new sees both soon.
#[derive(Debug)]
pub(crate) struct LimitState {
    total: AtomicU64,
    resident: AtomicU64,
    /// End of the time to reach a lowered limit, in milliseconds since the start; 0 outside of it.
    settles_until: AtomicU64,
    warned: AtomicBool,
    /// The largest excess that is not tolerated, and the limit that it was above.
    worst: AtomicU64,
    worst_limit: AtomicU64,
}

/// How far a group is above its limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Excess {
    /// Bytes above the limit.
    pub bytes: u64,
    /// The limit that they are above.
    pub limit: u64,
}

impl Excess {
    /// Whether it is more than what is tolerated.
    pub(crate) fn is_reported(self) -> bool {
        self.bytes > 0 && self.bytes > tolerance(self.limit)
    }
}

impl LimitState {
    /// The limit at the start.
    pub(crate) fn new(limit: Limit) -> LimitState {
        LimitState {
            total: AtomicU64::new(limit.total_bytes.unwrap_or(NONE)),
            resident: AtomicU64::new(limit.resident_bytes.unwrap_or(NONE)),
            settles_until: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            worst: AtomicU64::new(0),
            worst_limit: AtomicU64::new(0),
        }
    }

    /// The limit in force.
    pub(crate) fn get(&self) -> Limit {
        let limit = |bytes: &AtomicU64| Some(bytes.load(Relaxed)).filter(|bytes| *bytes != NONE);
        Limit {
            total_bytes: limit(&self.total),
            resident_bytes: limit(&self.resident),
        }
    }

    /// Changes the limit at a time in milliseconds since the start.
    pub(crate) fn set(&self, limit: Limit, now: u64) {
        let until = now + SETTLING.as_millis() as u64;
        self.settles_until.store(until, Relaxed);
        self.total.store(limit.total_bytes.unwrap_or(NONE), Relaxed);
        self.resident
            .store(limit.resident_bytes.unwrap_or(NONE), Relaxed);
    }

    /// How far these sizes are above the limit: not at all while a lowered limit is being reached.
    pub(crate) fn excess(&self, resident: u64, total: u64, now: u64) -> Excess {
        let above = |size: u64, limit: &AtomicU64| {
            let limit = limit.load(Relaxed);
            let bytes = size.saturating_sub(limit);
            Excess { bytes, limit }
        };
        let (of_total, of_resident) = (above(total, &self.total), above(resident, &self.resident));
        // One that is not tolerated counts, though another one is larger.
        let rank = |excess: Excess| (excess.is_reported(), excess.bytes);
        let excess = if rank(of_total) >= rank(of_resident) {
            of_total
        } else {
            of_resident
        };
        let until = self.settles_until.load(Relaxed);
        if until == 0 {
            return excess;
        }
        if excess.bytes == 0 || now >= until {
            self.settles_until.store(0, Relaxed);
            return excess;
        }
        Excess::default()
    }

    /// Remembers an excess if it is the largest that is not tolerated.
    pub(crate) fn note(&self, excess: Excess) {
        if excess.is_reported() && excess.bytes > self.worst.fetch_max(excess.bytes, Relaxed) {
            self.worst_limit.store(excess.limit, Relaxed);
        }
    }

    /// The largest excess that was not tolerated; of 0 bytes above 0 if every limit so far was kept.
    pub(crate) fn worst(&self) -> Excess {
        Excess {
            bytes: self.worst.load(Relaxed),
            limit: self.worst_limit.load(Relaxed),
        }
    }

    /// Whether an excess is to be warned of, which is once.
    pub(crate) fn may_warn(&self, excess: Excess) -> bool {
        excess.is_reported() && !self.warned.swap(true, Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn total(bytes: u64) -> Limit {
        Limit {
            total_bytes: Some(bytes),
            resident_bytes: None,
        }
    }

    #[test]
    fn little_is_tolerated_and_more_is_warned_of_once() {
        let state = LimitState::new(total(64 * MIB));
        let excess = |size| state.excess(0, size, 0);
        assert_eq!(excess(60 * MIB).bytes, 0);
        assert!(!state.may_warn(excess(68 * MIB)));
        assert!(state.may_warn(excess(69 * MIB)));
        assert!(!state.may_warn(excess(90 * MIB)));
        assert_eq!(tolerance(1 << 30), 32 * MIB);
    }

    #[test]
    fn a_limit_that_was_exceeded_is_remembered_after_it_was_raised() {
        let state = LimitState::new(Limit {
            total_bytes: Some(1 << 30),
            resident_bytes: Some(16 * MIB),
        });
        state.note(state.excess(20 * MIB, 40 * MIB, 0));
        assert_eq!(state.worst(), Excess::default(), "4 MiB are tolerated");
        // So are 30 MiB of the total limit, which is exceeded by more.
        state.note(state.excess(40 * MIB, (1 << 30) + 30 * MIB, 0));
        let worst = Excess {
            bytes: 24 * MIB,
            limit: 16 * MIB,
        };
        assert_eq!(state.worst(), worst);
        state.set(total(2 << 30), 0);
        state.note(state.excess(40 * MIB, 60 * MIB, 0));
        assert_eq!(state.worst(), worst);
    }

    #[test]
    fn a_lowered_limit_has_time_to_be_reached() {
        let state = LimitState::new(total(100 * MIB));
        state.set(total(50 * MIB), 1000);
        assert_eq!(state.get(), total(50 * MIB));
        assert_eq!(state.excess(0, 90 * MIB, 1500).bytes, 0);
        assert_eq!(state.excess(0, 49 * MIB, 1600).bytes, 0, "reached");
        assert_eq!(state.excess(0, 60 * MIB, 1700).bytes, 10 * MIB);
        state.set(total(40 * MIB), 2000);
        assert_eq!(state.excess(0, 60 * MIB, 11_999).bytes, 0);
        assert_eq!(state.excess(0, 60 * MIB, 12_000).bytes, 20 * MIB);
    }

    #[test]
    fn the_larger_excess_counts() {
        let state = LimitState::new(Limit {
            total_bytes: Some(100 * MIB),
            resident_bytes: Some(50 * MIB),
        });
        let excess = state.excess(70 * MIB, 110 * MIB, 0);
        assert_eq!((excess.bytes, excess.limit), (20 * MIB, 50 * MIB));
    }
}
