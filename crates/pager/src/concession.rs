//! What a group may keep above its limit, for a while, because nothing more could be moved out.
//!
//! Where that is so, faults must not wait for room each: they would wait for the reclaimer to find
//! out anew, and the little that can be moved at all, just brought in, would be moved out again. So
//! whoever gives up concedes what is there and a little more. It ends soon, for what was locked,
//! stopped or busy may not stay so, and is then tried again; after longer each time, as each try
//! costs processor time.

use crate::group::lock;
use std::sync::Mutex;
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

#[cfg(test)]
mod tests {
    use super::*;

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
