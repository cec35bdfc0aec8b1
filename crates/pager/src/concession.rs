//! What a group may keep above its limit, for a while, because nothing more could be moved out.
//!
//! Where that is so, faults must not wait for room each: they would wait for the reclaimer to find
//! out anew, and the little that can be moved at all, just brought in, would be moved out again. So
//! whoever gives up concedes what is there and a little more. It ends soon, for what was locked,
//! stopped or busy may not stay so, and is then tried again; after longer each time, as each try
//! costs processor time.

use crate::group::lock;
use crate::options::Limit;
use memfold_sys::PAGE_SIZE;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);
/// Programs may take so much more before the next try, or this part of what they have.
const ROOM_BYTES: u64 = 4 << 20;
const ROOM_PART: u64 = 32;

#[derive(Debug, Clone, Copy)]
struct Granted {
    bytes: u64,
    until: Instant,
    lasts: Duration,
}

#[derive(Debug, Default)]
pub struct Concession(Mutex<Option<Granted>>);

impl Concession {
    /// Nothing more can be moved out of `resident` bytes.
    pub fn grant(&self, resident: u64, now: Instant) {
        let mut granted = lock(&self.0);
        let again = granted.filter(|last| now < last.until + last.lasts);
        let lasts = again.map_or(SHORTEST, |last| LONGEST.min(last.lasts * 2));
        *granted = Some(Granted {
            bytes: resident + ROOM_BYTES.max(resident / ROOM_PART),
            until: now + lasts,
            lasts,
        });
    }

    /// Resident bytes that are allowed whatever the limit is.
    pub fn bytes(&self, now: Instant) -> u64 {
        let granted = lock(&self.0).filter(|granted| now < granted.until);
        granted.map_or(0, |granted| granted.bytes)
    }
}

/// A page that takes more in the pool is not worth to be moved out where only what compression gains
/// counts.
const WORTH_STORING_BYTES: u64 = (PAGE_SIZE / 8 * 7) as u64;
/// So many pages may be put back, and so many for each that was worth it, before it is futile to go on.
const REFUSED: i64 = 4096;
const REFUSED_EACH: i64 = 4;

/// What moving pages out gains.
#[derive(Debug)]
pub struct Gains {
    /// Whether only compression gains anything: the pool counts, and nothing takes pages from there.
    by_compression: bool,
    /// Pages that were put back, less [`REFUSED_EACH`] for each that was not.
    refused: AtomicI64,
}

impl Gains {
    pub fn new(limit: Limit, has_file: bool) -> Gains {
        Gains {
            by_compression: limit.resident_bytes.is_none() && !has_file,
            refused: AtomicI64::new(0),
        }
    }

    /// Whether a page that takes `stored` bytes in the pool is worth to be there.
    pub fn has(&self, stored: Option<u64>) -> bool {
        !self.by_compression || stored.is_some_and(|bytes| bytes <= WORTH_STORING_BYTES)
    }

    /// Notes what became of pages that were tried; whether it is futile to go on.
    pub fn note(&self, out: usize, refused: usize) -> bool {
        let change = refused as i64 - REFUSED_EACH * out as i64;
        let now = self.refused.fetch_add(change, Ordering::Relaxed) + change;
        let futile = now > REFUSED;
        if futile || now < 0 {
            // What others note meanwhile is lost.
            self.refused.store(0, Ordering::Relaxed);
        }
        futile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_gains_only_where_the_pool_counts_and_is_the_end() {
        let by = |resident_bytes, has_file| {
            let limit = Limit {
                total_bytes: Some(1 << 30),
                resident_bytes,
            };
            Gains::new(limit, has_file)
        };
        assert!(by(None, true).has(Some(4096)) && by(Some(1), false).has(Some(4096)));
        let gains = by(None, false);
        assert!(gains.has(Some(0)) && gains.has(Some(3584)) && !gains.has(Some(3600)));
    }

    #[test]
    fn too_many_refused_in_all_are_futile() {
        let gains = Gains::new(Limit::default(), false);
        assert!(!gains.note(1000, 0));
        assert!(!gains.note(0, 4096));
        assert!(gains.note(0, 1));
        assert!(!gains.note(0, 4000) && !gains.note(24, 96) && !gains.note(1, 100));
        assert!(gains.note(0, 1));
    }

    #[test]
    fn it_ends_and_lasts_longer_when_it_is_needed_again_soon() {
        let (concession, start) = (Concession::default(), Instant::now());
        assert_eq!(concession.bytes(start), 0);
        concession.grant(1 << 30, start);
        assert_eq!(concession.bytes(start), (1 << 30) + (1 << 25));
        let mut now = start + SHORTEST;
        assert_eq!(concession.bytes(now), 0);
        for lasts in [2, 4, 8, 16, 20, 20].map(|times| SHORTEST * times) {
            concession.grant(1 << 20, now);
            now += lasts;
            assert_eq!(concession.bytes(now - Duration::from_millis(1)), 5 << 20);
            assert_eq!(concession.bytes(now), 0);
        }
        now += LONGEST;
        concession.grant(1 << 20, now);
        assert_eq!(concession.bytes(now + SHORTEST), 0);
    }
}
