//! The sizes at which reclaim starts, stops, and becomes urgent.

use crate::time::Instant;
use std::time::Duration;

/// The longest time for which reclaim is more urgent than programs. Longer holds the limit where they write new memory for
/// longer, and takes more from other programs where what is above the limit cannot leave memory.
const LONGEST_SURGE: Duration = Duration::from_millis(250);

/// Watermarks in resident bytes (not in free pages, as in the kernel): `exceeded > hard > pressing >
/// start > stop`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watermarks {
    /// Above this programs yield their CPUs to the reclaimer, for a while ([`Surge`]).
    pub exceeded: u64,
    /// The limit; faults that need room wait above it.
    pub hard: u64,
    /// Above this the reclaimer no longer yields its CPU to programs.
    pub pressing: u64,
    /// Background reclaim starts above this.
    pub start: u64,
    /// Background reclaim stops below this.
    pub stop: u64,
}

impl Watermarks {
    /// The watermarks for a resident limit in bytes. A larger distance reclaims in longer bursts and
    /// keeps less resident.
    pub(crate) fn of(limit: u64) -> Watermarks {
        let distance = (limit / 128).clamp(512 << 10, 32 << 20).min(limit / 4);
        Watermarks {
            exceeded: limit.saturating_add(distance),
            hard: limit,
            pressing: limit - distance / 4,
            start: limit - distance,
            stop: limit - 2 * distance,
        }
    }

    /// The same, with reclaim down to so many bytes at least. Faults wait for room at the same size.
    pub(crate) fn lowered_to(self, target: u64) -> Watermarks {
        Watermarks {
            start: self.start.min(target),
            stop: self.stop.min(target),
            ..self
        }
    }
}

/// For how long the limit has been exceeded without a break.
#[derive(Debug, Default)]
pub(crate) struct Surge {
    since: Option<Instant>,
}

impl Surge {
    /// Whether so many resident bytes have exceeded the limit for so short a time that reclaim can be expected to end that.
    pub(crate) fn note(&mut self, resident: u64, marks: &Watermarks, now: Instant) -> bool {
        if resident <= marks.hard {
            self.since = None;
        }
        resident > marks.exceeded
            && now.duration_since(*self.since.get_or_insert(now)) < LONGEST_SURGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excess_is_urgent_until_it_turns_out_to_stay() {
        let marks = Watermarks::of(100 << 20);
        let start = Instant::now();
        let mut surge = Surge::default();
        let mut note = |resident, after| surge.note(resident, &marks, start + after);
        let (below, slightly, far) = (marks.hard, marks.exceeded, marks.exceeded + 1);
        assert!(!note(slightly, Duration::ZERO));
        assert!(note(far, LONGEST_SURGE));
        assert!(!note(slightly, LONGEST_SURGE));
        assert!(note(far, LONGEST_SURGE * 3 / 2));
        assert!(!note(far, LONGEST_SURGE * 2));
        assert!(!note(slightly, LONGEST_SURGE * 3));
        assert!(!note(far, LONGEST_SURGE * 3), "it has not ended in between");
        assert!(!note(below, LONGEST_SURGE * 4));
        assert!(note(far, LONGEST_SURGE * 5));
    }

    #[test]
    fn the_largest_limit_has_watermarks() {
        let marks = Watermarks::of(u64::MAX);
        assert!(marks.exceeded >= marks.hard && marks.hard > marks.pressing);
    }
}
