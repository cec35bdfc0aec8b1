//! What `madvise` dropped of memory that is not managed yet.
//!
//! The event comes before the pages go, and its thread may be held up in between. Of managed memory the
//! page states tell which pages these are (`Removed`). Of memory that is registered and not managed,
//! which pages it has is looked for only as it becomes managed: those found may be about to go, and must
//! neither count as resident nor be carried off by reclaim, or the old contents could come back.

use crate::page::PageRange;
use crate::page_state::Removal;
use crate::range_set::RangeSet;

/// More ranges than these count as one.
const MOST_RANGES: usize = 256;

/// See the module.
#[derive(Default)]
pub struct RecentRemovals {
    ranges: RangeSet,
    last: Option<Removal>,
}

impl RecentRemovals {
    /// Notes what was dropped just now.
    pub fn note(&mut self, ranges: &[PageRange], removal: Removal) {
        self.forget_what_is_over(removal.seconds);
        if ranges.is_empty() {
            return;
        }
        self.last = Some(removal);
        ranges.iter().for_each(|range| self.ranges.add(*range));
        if let all @ [first, .., last] = self.ranges.ranges()
            && all.len() > MOST_RANGES
        {
            let hull = PageRange {
                start: first.start,
                end: last.end,
            };
            self.ranges.add(hull);
        }
    }

    /// What may be about to go at `now`, in seconds, with the last of the removals.
    pub fn lately(&mut self, now: u32) -> Option<(&RangeSet, Removal)> {
        self.forget_what_is_over(now);
        Some((&self.ranges, self.last?))
    }

    fn forget_what_is_over(&mut self, now: u32) {
        if self.last.is_some_and(|removal| removal.is_over(now)) {
            *self = RecentRemovals::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn what_was_dropped_is_known_for_a_while() {
        let mut dropped = RecentRemovals::default();
        assert!(dropped.lately(0).is_none());
        dropped.note(&[range(10, 20)], Removal::new(100, 1));
        dropped.note(&[range(30, 40)], Removal::new(105, 2));
        dropped.note(&[], Removal::new(110, 3));
        let (ranges, last) = dropped.lately(115).unwrap();
        assert_eq!(ranges.ranges(), [range(10, 20), range(30, 40)]);
        assert_eq!(last, Removal::new(105, 2));
        assert!(dropped.lately(116).is_none());
        dropped.note(&[range(50, 60)], Removal::new(120, 4));
        let (ranges, _) = dropped.lately(120).unwrap();
        assert_eq!(ranges.ranges(), [range(50, 60)]);
    }

    #[test]
    fn many_ranges_become_one() {
        let mut dropped = RecentRemovals::default();
        for start in 0..=MOST_RANGES as u64 {
            let part = range(start * 10, start * 10 + 1);
            dropped.note(&[part], Removal::new(1, 0));
        }
        let (ranges, _) = dropped.lately(1).unwrap();
        assert_eq!(ranges.ranges(), [range(0, MOST_RANGES as u64 * 10 + 1)]);
    }
}
