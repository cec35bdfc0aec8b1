//! Relaxing a group's limit for a while when reclaim makes no progress.
//!
//! Otherwise every fault would wait until the reclaimer fails once more, and the few reclaimable pages
//! would thrash. [`LimitRelief`] raises the limit to the resident size plus a margin. The relief is
//! short, because incompressible data ([`CompressionPolicy`]) may be replaced, and grows when it is
//! needed again, because each retry costs CPU time. Failure to move any page may be transient
//! (COW-shared pages, a helper without a CPU, memory not registered yet), so it must last first
//! ([`NoProgress`]).

use crate::options::Limit;
use crate::time::Instant;
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// First and longest duration of a relief, in milliseconds. Longer saves CPU time spent on futile
/// reclaim, and exceeds the limit for longer once data compresses again.
const SHORTEST: u64 = 100;
const LONGEST: u64 = 2000;
/// Margin above the resident size, in bytes, or as a divisor of the resident size; the larger applies.
/// A larger margin delays the next futile reclaim and exceeds the limit by more.
const ROOM_BYTES: u64 = 4 << 20;
const ROOM_PART: u64 = 32;

/// A temporary allowance above the limit. Any thread reads it; the thread whose reclaim failed sets it.
///
/// There is no lock, because the library reads it in a signal handler. All accesses are Relaxed: a
/// reader may see the size of one relief with the deadline of another, and both are valid allowances.
#[derive(Debug)]
pub(crate) struct LimitRelief {
    start: Instant,
    /// Allowed resident bytes.
    bytes: AtomicU64,
    /// End of the relief, in milliseconds since `start`.
    until: AtomicU64,
    /// Duration of the last relief, in milliseconds.
    lasts: AtomicU64,
}

impl LimitRelief {
    /// No relief yet; times count from `start`.
    pub(crate) fn new(start: Instant) -> LimitRelief {
        LimitRelief {
            start,
            bytes: AtomicU64::new(0),
            until: AtomicU64::new(0),
            lasts: AtomicU64::new(0),
        }
    }

    /// Allows `resident` bytes plus a margin, for twice as long as before if the last relief ended
    /// recently. During a relief with room left, as several threads may fail at once, for as long as that one.
    pub(crate) fn relax(&self, resident: u64, now: Instant) {
        let now = self.milliseconds(now);
        let (last, until) = (self.lasts.load(Relaxed), self.until.load(Relaxed));
        let lasts = if now < until && resident < self.bytes.load(Relaxed) {
            last
        } else if now < until + last {
            LONGEST.min(last * 2)
        } else {
            SHORTEST
        };
        self.lasts.store(lasts, Relaxed);
        self.bytes
            .store(resident + ROOM_BYTES.max(resident / ROOM_PART), Relaxed);
        self.until.store(now + lasts, Relaxed);
    }

    /// Resident bytes that are allowed whatever the limit is; 0 outside a relief.
    pub(crate) fn bytes(&self, now: Instant) -> u64 {
        if self.milliseconds(now) < self.until.load(Relaxed) {
            self.bytes.load(Relaxed)
        } else {
            0
        }
    }

    /// The time until the relief ends; `None` outside one.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        let until = self.until.load(Relaxed);
        let left = until.checked_sub(self.milliseconds(now))?;
        (left > 0).then(|| Duration::from_millis(left))
    }

    fn milliseconds(&self, now: Instant) -> u64 {
        now.duration_since(self.start).as_millis() as u64
    }
}

/// Accumulated futile time decays by the elapsed time divided by this. A larger divisor makes short
/// failures far apart add up.
const DECAY_DIVISOR: u64 = 4;
/// Accumulated futile milliseconds above which the failure is not transient. A larger value keeps
/// faults waiting for longer before the limit is relaxed.
const STUCK: u64 = 500;
/// Cap of the accumulated futile time, in milliseconds. A larger cap remembers one long failure for
/// longer.
const FUTILE_CAP: u64 = 1000;

/// Measures for how long reclaim found no page that can be moved at all, such as only locked or
/// executable memory. One thread owns it.
#[derive(Debug, Default)]
pub(crate) struct NoProgress {
    /// Accumulated futile time after decay, in milliseconds.
    futile: u64,
    /// End of the last failure, in milliseconds.
    last: u64,
}

impl NoProgress {
    /// Notes a failure that lasted `lasted` milliseconds and ends `now`. Returns whether failures
    /// persist.
    pub(crate) fn note(&mut self, lasted: u64, now: u64) -> bool {
        let decay = (now - self.last) / DECAY_DIVISOR;
        self.futile = self.futile.saturating_sub(decay) + lasted;
        self.futile = self.futile.min(FUTILE_CAP);
        self.last = now;
        self.futile > STUCK
    }
}

/// Compressed size in bytes above which a page is put back, where only compression frees memory. A
/// larger value stores pages for a smaller gain.
const WORTH_STORING_BYTES: u64 = (PAGE_SIZE / 8 * 7) as u64;
/// Pages that may be put back, and pages more for each stored one, before reclaim gives up. Larger
/// values spend more CPU time on incompressible data.
const REFUSED: i64 = 4096;
const REFUSED_EACH: i64 = 4;

/// Decides whether storing a page is worth it. Only compression frees memory if the pool counts towards
/// the limit and neither a swap file nor a store takes pages from it.
///
/// Any thread uses it. All accesses are Relaxed: the count and the flag are independent estimates.
#[derive(Debug)]
pub(crate) struct CompressionPolicy {
    pool_counts: AtomicBool,
    pool_has_outlet: AtomicBool,
    /// Pages put back, less [`REFUSED_EACH`] per stored page.
    refused: AtomicI64,
}

impl CompressionPolicy {
    /// The policy under `limit`, without a swap file.
    pub(crate) fn new(limit: Limit) -> CompressionPolicy {
        CompressionPolicy {
            pool_counts: AtomicBool::new(limit.resident_bytes.is_none()),
            pool_has_outlet: AtomicBool::new(false),
            refused: AtomicI64::new(0),
        }
    }

    /// Follows another limit.
    pub(crate) fn set_limit(&self, limit: Limit) {
        self.pool_counts
            .store(limit.resident_bytes.is_none(), Relaxed);
    }

    /// Notes whether what is in the pool can leave it, to a swap file or a store.
    pub(crate) fn note_outlet(&self, exists: bool) {
        self.pool_has_outlet.store(exists, Relaxed);
    }

    /// Whether a page is worth storing. `stored` returns its size in the pool, and is called only if
    /// the size matters.
    pub(crate) fn pays(&self, stored: impl FnOnce() -> Option<u64>) -> bool {
        !self.pool_counts.load(Relaxed)
            || self.pool_has_outlet.load(Relaxed)
            || stored().is_some_and(|bytes| bytes <= WORTH_STORING_BYTES)
    }

    /// Notes `out` stored and `refused` put back pages. Returns whether to give up.
    pub(crate) fn note(&self, out: usize, refused: usize) -> bool {
        let change = refused as i64 - REFUSED_EACH * out as i64;
        let now = self.refused.fetch_add(change, Relaxed) + change;
        let futile = now > REFUSED;
        if futile || now < 0 {
            // Losing a concurrent note only delays or hastens giving up by one batch.
            self.refused.store(0, Relaxed);
        }
        futile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_gains_only_where_the_pool_counts_and_is_the_end() {
        let by = |resident_bytes| {
            CompressionPolicy::new(Limit {
                total_bytes: Some(1 << 30),
                resident_bytes,
            })
        };
        let stored = |bytes| move || Some(bytes);
        assert!(by(Some(1)).pays(stored(4096)));
        let compression = by(None);
        assert!(
            compression.pays(stored(0))
                && compression.pays(stored(3584))
                && !compression.pays(stored(3600))
        );
        compression.note_outlet(true);
        assert!(compression.pays(stored(4096)));
        compression.note_outlet(false);
        assert!(!compression.pays(stored(4096)) && !compression.pays(|| None));
    }

    #[test]
    fn too_many_refused_in_all_are_futile() {
        let compression = CompressionPolicy::new(Limit::default());
        assert!(!compression.note(1000, 0));
        assert!(!compression.note(0, 4096));
        assert!(compression.note(0, 1));
        assert!(
            !compression.note(0, 4000) && !compression.note(24, 96) && !compression.note(1, 100)
        );
        assert!(compression.note(0, 1));
    }

    #[test]
    fn persistent_failure_is_told_from_transient_failure() {
        let mut search = NoProgress::default();
        let mut now = 1000;
        let mut note = |times: u64, lasted: u64, step: u64, now: &mut u64| {
            let found = (0..times).filter(|_| {
                *now += step;
                search.note(lasted, *now)
            });
            found.count()
        };
        assert_eq!(note(1000, 10, 50, &mut now), 0, "a fifth of the time");
        assert_eq!(note(60, 8, 10, &mut now), 0, "for half a second");
        assert!(note(100, 8, 10, &mut now) > 0, "for a second");
        now += LONGEST / 2;
        assert!(note(1, 8, 10, &mut now) > 0, "also after a relief");
        now += 60_000;
        assert_eq!(note(50, 8, 10, &mut now), 0, "not much later");
    }

    #[test]
    fn a_relief_ends_and_lasts_longer_when_it_is_needed_again_soon() {
        let start = Instant::now();
        let relief = LimitRelief::new(start);
        assert_eq!(relief.bytes(start), 0);
        relief.relax(1 << 30, start);
        assert_eq!(relief.bytes(start), (1 << 30) + (1 << 25));
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        // Several threads fail at once.
        (0..6).for_each(|_| relief.relax(1 << 30, start));
        assert_eq!(relief.left(start), Some(Duration::from_millis(SHORTEST)));
        relief.relax(2 << 30, start);
        let outgrown = relief.left(start);
        assert_eq!(outgrown, Some(Duration::from_millis(2 * SHORTEST)));
        let relief = LimitRelief::new(start);
        relief.relax(1 << 30, start);
        let mut now = SHORTEST;
        assert_eq!(relief.left(after(now)), None);
        assert_eq!(relief.bytes(after(now)), 0);
        for lasts in [200, 400, 800, 1600, 2000, 2000] {
            relief.relax(1 << 20, after(now));
            now += lasts;
            assert_eq!(relief.bytes(after(now - 1)), 5 << 20);
            assert_eq!(relief.bytes(after(now)), 0);
        }
        now += LONGEST;
        relief.relax(1 << 20, after(now));
        assert_eq!(relief.bytes(after(now + SHORTEST)), 0);
    }
}
