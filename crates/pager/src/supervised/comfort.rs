//! The limit under which a run would have spent little time on swapping, and the least that it would have kept.
//!
//! More memory would have kept the pages whose refault distance it covers, and first touches would have
//! waited less for room. From what was measured under the limit in force, this estimates what
//! would remain under a larger one, and searches the smallest that leaves little.

use crate::options::Floor;

/// The share of their time for which programs may wait for memfold and still run comfortably.
pub const COMFORTABLE_SHARE: f64 = 0.05;
/// Limits that are tried, evenly spaced.
const STEPS: u64 = 256;
/// Divisor of the limit: so much of it pages cannot use, as reclaim starts below it and metadata counts. A
/// smaller divisor suggests larger limits.
const UNUSED_DIVISOR: u64 = 32;

/// What was measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    /// The limit in force, in bytes.
    pub limit: u64,
    /// Whether the pool counts towards it.
    pub pool_counts: bool,
    /// Most resident and swapped-out bytes at a time.
    pub needed: u64,
    /// Pool bytes for each byte that is out.
    pub density: f64,
    /// CPU time of the programs, in nanoseconds.
    pub cpu_ns: u64,
    /// Waits for pages that were out, in nanoseconds.
    pub swap_in_wait_ns: u64,
    /// Waits of first touches, in nanoseconds.
    pub first_touch_wait_ns: u64,
}

impl Measured {
    /// The estimated limit; `None` where the one in force is comfortable, or all fits. `remaining` is the part of the
    /// swap-ins that remains with room for so many bytes more.
    pub(crate) fn comfortable_limit(&self, remaining: impl Fn(u64) -> f64) -> Option<u64> {
        let waits = (self.swap_in_wait_ns, self.first_touch_wait_ns);
        if self.share(waits.0 as f64, waits.1 as f64) <= COMFORTABLE_SHARE {
            return None;
        }
        let before = self.resident(self.limit);
        // All fits.
        let most = self.needed + self.needed.div_ceil(UNUSED_DIVISOR - 1);
        if self.limit >= most {
            return None;
        }
        let step = (most - self.limit).div_ceil(STEPS).max(1);
        let mut limits = (1..=STEPS).map(|index| self.limit + index * step);
        limits.find(|limit| {
            let resident = self.resident(*limit);
            // Nothing is out where all fits, however long the distances were.
            let swap_in = if resident >= self.needed {
                0.0
            } else {
                waits.0 as f64 * remaining(resident.saturating_sub(before))
            };
            let out = |resident: u64| self.needed.saturating_sub(resident) as f64;
            let first_touch = waits.1 as f64 * out(resident) / out(before).max(1.0);
            self.share(swap_in, first_touch) <= COMFORTABLE_SHARE
        })
    }

    /// The least limit under which the floor is resident and the rest is in the pool; `None` where the one in force is
    /// as large, or is not on the pool.
    pub(crate) fn held_limit(&self, floor: Floor) -> Option<u64> {
        let kept = floor.of(self.needed);
        let out = (self.needed - kept) as f64 * self.density();
        let usable = kept + out as u64;
        let held = usable + usable.div_ceil(UNUSED_DIVISOR - 1);
        (self.pool_counts && held > self.limit).then_some(held)
    }

    fn density(&self) -> f64 {
        self.density.clamp(0.0, 0.95)
    }

    fn share(&self, swap_in: f64, first_touch: f64) -> f64 {
        let waits = swap_in + first_touch;
        waits / (waits + self.cpu_ns as f64).max(1.0)
    }

    /// Bytes that are resident under a limit, of those that are needed.
    fn resident(&self, limit: u64) -> u64 {
        let usable = limit - limit / UNUSED_DIVISOR;
        if usable >= self.needed || !self.pool_counts {
            return usable.min(self.needed);
        }
        // The rest is out, and lies in the pool: resident + (needed - resident) * density = usable.
        let density = self.density();
        let resident = (usable as f64 - self.needed as f64 * density) / (1.0 - density);
        resident.max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn measured() -> Measured {
        Measured {
            limit: 100 * MIB,
            pool_counts: false,
            needed: 200 * MIB,
            density: 0.5,
            cpu_ns: 1_000_000_000,
            swap_in_wait_ns: 1_000_000_000,
            first_touch_wait_ns: 0,
        }
    }

    /// As for a program that goes round its memory.
    fn sweep(out: u64) -> impl Fn(u64) -> f64 {
        move |more| if more >= out { 0.0 } else { 1.0 }
    }

    #[test]
    fn a_sweep_needs_all_of_its_memory() {
        let limit = measured().comfortable_limit(sweep(100 * MIB)).unwrap();
        assert!((200 * MIB..208 * MIB).contains(&limit), "{}", limit / MIB);
    }

    #[test]
    fn with_the_pool_counted_each_step_gains_more() {
        let measured = Measured {
            pool_counts: true,
            limit: 150 * MIB,
            ..measured()
        };
        assert_eq!(measured.resident(200 * MIB * 32 / 31 + 1), 200 * MIB);
        let resident = measured.resident(150 * MIB);
        assert!(resident.abs_diff(91 * MIB) < 2 * MIB, "{}", resident / MIB);
        // What would keep half of the pages that are out.
        let limit = measured.comfortable_limit(sweep(50 * MIB)).unwrap();
        assert!((174 * MIB..178 * MIB).contains(&limit), "{}", limit / MIB);
    }

    #[test]
    fn the_least_limit_holds_the_floor_and_the_pool() {
        let measured = Measured {
            pool_counts: true,
            limit: 80 * MIB,
            ..measured()
        };
        // A tenth of 200 MiB, and half of the rest.
        let held = measured.held_limit(Floor::new(10).unwrap()).unwrap();
        assert!((110 * MIB..115 * MIB).contains(&held), "{}", held / MIB);
        assert!(measured.resident(held) >= 20 * MIB - 1);
        let enough = Measured {
            limit: held,
            ..measured
        };
        assert_eq!(enough.held_limit(Floor::new(10).unwrap()), None);
        let of_resident = Measured {
            pool_counts: false,
            ..measured
        };
        assert_eq!(of_resident.held_limit(Floor::default()), None);
    }

    #[test]
    fn long_distances_ask_for_no_more_than_all_memory() {
        let limit = measured().comfortable_limit(|_| 0.9).unwrap();
        assert!((200 * MIB..208 * MIB).contains(&limit), "{}", limit / MIB);
    }

    #[test]
    fn what_is_comfortable_needs_no_other_limit() {
        let measured = Measured {
            swap_in_wait_ns: 50_000_000,
            ..measured()
        };
        assert_eq!(measured.comfortable_limit(sweep(MIB)), None);
    }

    #[test]
    fn first_touches_wait_for_what_does_not_fit() {
        let measured = Measured {
            swap_in_wait_ns: 0,
            first_touch_wait_ns: 100_000_000,
            ..measured()
        };
        // About half of the waits are allowed.
        let limit = measured.comfortable_limit(sweep(0)).unwrap();
        assert!((150 * MIB..160 * MIB).contains(&limit), "{}", limit / MIB);
    }
}
