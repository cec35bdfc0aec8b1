//! What a group may keep above its limit, for a while, because nothing is gained by moving more out.
//!
//! Where that is so, faults must not wait for room each: they would wait for the reclaimer to find
//! out anew, and the little that can be moved at all, just brought in, would be moved out again. So
//! whoever gives up concedes what is there and a little more. It ends soon, as what does not compress
//! ([`CompressionPolicy`]) may be other data by then; later each time, as each try costs processor time. Where nothing
//! can be moved at all it may pass in a moment (pages that a fork shares, a helper without a
//! processor, memory that is not registered yet), so that must have been so for long ([`NoProgress`]).

use crate::options::Limit;
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Milliseconds.
const SHORTEST: u64 = 100;
const LONGEST: u64 = 2000;
/// Programs may take so much more before the next try, or this part of what they have.
const ROOM_BYTES: u64 = 4 << 20;
const ROOM_PART: u64 = 32;

/// No lock: the library asks in a signal handler, too. Who reads while another grants sees a part of
/// either, which does no harm.
#[derive(Debug)]
pub struct LimitRelief {
    start: Instant,
    bytes: AtomicU64,
    /// Milliseconds since the start.
    until: AtomicU64,
    /// Milliseconds.
    lasts: AtomicU64,
}

impl LimitRelief {
    pub fn new(start: Instant) -> LimitRelief {
        LimitRelief {
            start,
            bytes: AtomicU64::new(0),
            until: AtomicU64::new(0),
            lasts: AtomicU64::new(0),
        }
    }

    /// Nothing more can be moved out of `resident` bytes.
    pub fn relax(&self, resident: u64, now: Instant) {
        let now = self.milliseconds(now);
        let last = self.lasts.load(Relaxed);
        let again = now < self.until.load(Relaxed) + last;
        let lasts = if again {
            LONGEST.min(last * 2)
        } else {
            SHORTEST
        };
        self.lasts.store(lasts, Relaxed);
        self.bytes
            .store(resident + ROOM_BYTES.max(resident / ROOM_PART), Relaxed);
        self.until.store(now + lasts, Relaxed);
    }

    /// Resident bytes that are allowed whatever the limit is.
    pub fn bytes(&self, now: Instant) -> u64 {
        if self.milliseconds(now) < self.until.load(Relaxed) {
            self.bytes.load(Relaxed)
        } else {
            0
        }
    }

    fn milliseconds(&self, now: Instant) -> u64 {
        now.duration_since(self.start).as_millis() as u64
    }
}

/// Of the time that passes, such a part is taken off what is remembered.
const FORGOTTEN_PART: u64 = 4;
/// So many milliseconds of vain search in a short time are no passing trouble.
const STUCK: u64 = 500;
/// More are not remembered.
const REMEMBERED: u64 = 1000;

/// Remembers for how long reclaim found nothing that can be moved at all: memory that is locked, say, or
/// may be executed.
#[derive(Debug, Default)]
pub struct NoProgress {
    remembered: u64,
    /// Of the last, in milliseconds.
    last: u64,
}

impl NoProgress {
    /// Notes one that ends `now`, after so many milliseconds; whether it was like this for long.
    pub fn note(&mut self, lasted: u64, now: u64) -> bool {
        let forgotten = (now - self.last) / FORGOTTEN_PART;
        self.remembered = self.remembered.saturating_sub(forgotten) + lasted;
        self.remembered = self.remembered.min(REMEMBERED);
        self.last = now;
        self.remembered > STUCK
    }
}

/// A page that takes more in the pool is not worth to be moved out where only what compression gains
/// counts.
const WORTH_STORING_BYTES: u64 = (PAGE_SIZE / 8 * 7) as u64;
/// So many pages may be put back, and so many for each that was worth it, before it is futile to go on.
const REFUSED: i64 = 4096;
const REFUSED_EACH: i64 = 4;

/// What moving pages out gains: compression only, where the pool counts and nothing takes pages from
/// there.
#[derive(Debug)]
pub struct CompressionPolicy {
    pool_counts: bool,
    pool_has_outlet: AtomicBool,
    /// Pages that were put back, less [`REFUSED_EACH`] for each that was not.
    refused: AtomicI64,
}

impl CompressionPolicy {
    pub fn new(limit: Limit) -> CompressionPolicy {
        CompressionPolicy {
            pool_counts: limit.resident_bytes.is_none(),
            pool_has_outlet: AtomicBool::new(false),
            refused: AtomicI64::new(0),
        }
    }

    /// Notes whether there is a file with room for what is in the pool.
    pub fn note_outlet(&self, there_is: bool) {
        self.pool_has_outlet.store(there_is, Relaxed);
    }

    /// Whether a page is worth to be in the pool; how many bytes it takes there is asked only where
    /// that counts.
    pub fn pays(&self, stored: impl FnOnce() -> Option<u64>) -> bool {
        !self.pool_counts
            || self.pool_has_outlet.load(Relaxed)
            || stored().is_some_and(|bytes| bytes <= WORTH_STORING_BYTES)
    }

    /// Notes what became of pages that were tried; whether it is futile to go on.
    pub fn note(&self, out: usize, refused: usize) -> bool {
        let change = refused as i64 - REFUSED_EACH * out as i64;
        let now = self.refused.fetch_add(change, Relaxed) + change;
        let futile = now > REFUSED;
        if futile || now < 0 {
            // What others note meanwhile is lost.
            self.refused.store(0, Relaxed);
        }
        futile
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
    fn long_vain_search_is_no_passing_trouble() {
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
        assert!(note(1, 8, 10, &mut now) > 0, "also after it was conceded");
        now += 60_000;
        assert_eq!(note(50, 8, 10, &mut now), 0, "not much later");
    }

    #[test]
    fn it_ends_and_lasts_longer_when_it_is_needed_again_soon() {
        let start = Instant::now();
        let relief = LimitRelief::new(start);
        assert_eq!(relief.bytes(start), 0);
        relief.relax(1 << 30, start);
        assert_eq!(relief.bytes(start), (1 << 30) + (1 << 25));
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut now = SHORTEST;
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
