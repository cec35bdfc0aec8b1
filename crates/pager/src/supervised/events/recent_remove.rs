//! Recent `madvise` events on registered memory that is not managed yet.
//!
//! The event is read before the kernel drops the pages. In managed memory, state `Removed` marks them.
//! Unmanaged memory has no page states: its resident pages are looked up when it becomes managed. Pages
//! that are about to be dropped must not become `Resident` then, or reclaim could preserve their old
//! contents.

use crate::page::PageRange;
use crate::page_state::Removal;
use crate::range_set::RangeSet;

/// Number of ranges above which they are merged into one. More takes more memory; fewer marks more
/// pages as `Removed` that are not.
const MOST_RANGES: usize = 256;

/// Ranges dropped by `madvise` recently. Guarded by a mutex of the address space; events add to it, the
/// governor reads it.
#[derive(Default)]
pub(crate) struct RecentRemovals {
    ranges: RangeSet,
    last: Option<Removal>,
}

impl RecentRemovals {
    /// Adds the ranges of an event.
    pub(crate) fn note(&mut self, ranges: &[PageRange], removal: Removal) {
        self.expire(removal.seconds);
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

    /// The ranges whose pages the kernel may still drop at `now` (seconds since the supervisor's
    /// start), with the last removal.
    pub(crate) fn pending(&mut self, now: u32) -> Option<(&RangeSet, Removal)> {
        self.expire(now);
        Some((&self.ranges, self.last?))
    }

    fn expire(&mut self, now: u32) {
        if self.last.is_some_and(|removal| removal.is_old(now)) {
            *self = RecentRemovals::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn dropped_ranges_are_known_for_a_while() {
        let mut dropped = RecentRemovals::default();
        assert!(dropped.pending(0).is_none());
        dropped.note(&[range(10, 20)], Removal::new(100, 1));
        dropped.note(&[range(30, 40)], Removal::new(105, 2));
        dropped.note(&[], Removal::new(110, 3));
        let (ranges, last) = dropped.pending(115).unwrap();
        assert_eq!(ranges.ranges(), [range(10, 20), range(30, 40)]);
        assert_eq!(last, Removal::new(105, 2));
        assert!(dropped.pending(116).is_none());
        dropped.note(&[range(50, 60)], Removal::new(120, 4));
        let (ranges, _) = dropped.pending(120).unwrap();
        assert_eq!(ranges.ranges(), [range(50, 60)]);
    }

    #[test]
    fn many_ranges_become_one() {
        let mut dropped = RecentRemovals::default();
        for start in 0..=MOST_RANGES as u64 {
            let part = range(start * 10, start * 10 + 1);
            dropped.note(&[part], Removal::new(1, 0));
        }
        let (ranges, _) = dropped.pending(1).unwrap();
        assert_eq!(ranges.ranges(), [range(0, MOST_RANGES as u64 * 10 + 1)]);
    }
}
