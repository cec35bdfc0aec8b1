//! What stays resident where a limit cannot be held.
//!
//! Where the pool alone is larger than the limit, paging out more comes no closer to it: what goes out takes room
//! in the pool, and programs that keep a few pages only go round them. Then as much stays resident as the
//! pool and metadata are above the limit, at most a share of what the programs use. With the first of the two
//! it begins at nothing where the limit is just missed, and settles: more that is resident leaves less in the pool.

use crate::options::Floor;

/// The least resident limit that a pool can press a group down to, where the floor is none.
const LEAST_BYTES: u64 = 4 << 20;

/// A group that is under a limit on all of its memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    /// The limit.
    pub limit: u64,
    /// Pool and metadata.
    pub bytes: u64,
}

impl Stored {
    /// Bytes by which the pool alone is above the limit.
    pub(crate) fn beyond(&self) -> u64 {
        self.bytes.saturating_sub(self.limit)
    }

    /// Bytes that may be resident, of those that the programs `need`: resident and out.
    pub(crate) fn resident_limit(&self, floor: Floor, needed: impl FnOnce() -> u64) -> u64 {
        let floor = match self.beyond() {
            0 => 0,
            beyond => beyond.min(floor.of(needed())),
        };
        self.limit
            .saturating_sub(self.bytes)
            .max(floor)
            .max(LEAST_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn tenth() -> Floor {
        Floor::new(10).unwrap()
    }

    fn resident(limit: u64, stored: u64, needed: u64, floor: Floor) -> u64 {
        let stored = Stored {
            limit: limit * MIB,
            bytes: stored * MIB,
        };
        stored.resident_limit(floor, || needed * MIB) / MIB
    }

    #[test]
    fn a_limit_that_can_be_held_is() {
        let resident = |stored| resident(100, stored, 300, tenth());
        assert_eq!(resident(0), 100);
        assert_eq!(resident(60), 40);
        assert_eq!(resident(97), 4);
        assert_eq!(resident(100), 4);
    }

    #[test]
    fn beyond_it_the_floor_grows_from_nothing_to_its_share() {
        let resident = |stored| resident(100, stored, 300, tenth());
        assert_eq!(resident(104), 4);
        assert_eq!(resident(110), 10);
        assert_eq!(resident(130), 30);
        assert_eq!(resident(290), 30);
    }

    #[test]
    fn no_floor_leaves_the_least() {
        let none = Floor::new(0).unwrap();
        assert_eq!(resident(32, 290, 900, none), LEAST_BYTES / MIB);
    }

    /// Whatever is resident takes room in the pool away: one size is its own consequence.
    #[test]
    fn it_settles() {
        let half = Floor::new(50).unwrap();
        let mut now = 4.0;
        for _ in 0..50 {
            let stored = (300.0 - now) * 0.4;
            let allowed = resident(60, stored as u64, 300, half) as f64;
            now += (allowed - now) / 2.0;
        }
        // As much resident as the rest is above the limit: r = (300 - r) * 0.4 - 60.
        assert!((now - 60.0 / 1.4).abs() < 2.0, "{now}");
    }
}
