//! A sorted set of page ranges, for example the registered ranges of an address space.

use crate::page::{PageRange, VirtualPage};

/// Page ranges in address order. They neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(Vec<PageRange>);

impl FromIterator<PageRange> for RangeSet {
    fn from_iter<T: IntoIterator<Item = PageRange>>(ranges: T) -> RangeSet {
        let mut set = RangeSet::default();
        ranges.into_iter().for_each(|range| set.add(range));
        set
    }
}

impl RangeSet {
    /// All ranges, in address order.
    pub(crate) fn ranges(&self) -> &[PageRange] {
        &self.0
    }

    /// Number of pages in all ranges.
    pub(crate) fn pages(&self) -> u64 {
        self.0.iter().map(|range| range.pages()).sum()
    }

    /// The range that contains `page`.
    pub(crate) fn containing(&self, page: VirtualPage) -> Option<PageRange> {
        let index = self.0.partition_point(|range| range.end <= page);
        self.0
            .get(index)
            .copied()
            .filter(|range| range.start <= page)
    }

    /// Adds a range and merges it with the ranges it overlaps or touches.
    pub(crate) fn add(&mut self, mut range: PageRange) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|old| old.end < range.start);
        let last = self.0.partition_point(|old| old.start <= range.end);
        for old in &self.0[first..last] {
            range.start = range.start.min(old.start);
            range.end = range.end.max(old.end);
        }
        self.0.splice(first..last, [range]);
    }

    /// Adds all ranges of another set.
    pub(crate) fn add_all(&mut self, others: &RangeSet) {
        for range in others.ranges() {
            self.add(*range);
        }
    }

    /// Removes the pages of `range` from the set.
    pub(crate) fn remove(&mut self, range: PageRange) {
        let first = self.0.partition_point(|old| old.end <= range.start);
        let last = self.0.partition_point(|old| old.start < range.end);
        if range.is_empty() || first >= last {
            return;
        }
        let before = PageRange {
            start: self.0[first].start,
            end: range.start,
        };
        let after = PageRange {
            start: range.end,
            end: self.0[last - 1].end,
        };
        let kept = [before, after].into_iter().filter(|part| !part.is_empty());
        self.0.splice(first..last, kept);
    }

    /// The parts of `range` that are in the set.
    pub(crate) fn covered(&self, range: PageRange) -> Vec<PageRange> {
        let first = self.0.partition_point(|old| old.end <= range.start);
        let parts = self.0[first..].iter().map(|old| old.intersection(range));
        parts.take_while(|part| !part.is_empty()).collect()
    }

    /// The parts of `range` that are not in the set.
    pub(crate) fn uncovered(&self, range: PageRange) -> Vec<PageRange> {
        let mut parts = Vec::new();
        let mut start = range.start;
        for old in &self.0[self.0.partition_point(|old| old.end <= range.start)..] {
            if old.start >= range.end {
                break;
            }
            let gap = PageRange {
                start,
                end: old.start,
            };
            if !gap.is_empty() {
                parts.push(gap);
            }
            start = start.max(old.end);
        }
        let rest = PageRange {
            start,
            end: range.end,
        };
        if !rest.is_empty() {
            parts.push(rest);
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    /// Compares random adds and removes with a `BTreeSet` of page numbers.
    #[test]
    fn agrees_with_a_set_of_pages() {
        let mut regions = RangeSet::default();
        let mut pages = std::collections::BTreeSet::new();
        let mut seed = 12345u64;
        let mut next = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..3000 {
            let start = next(60);
            let change = range(start, start + next(12));
            if next(2) == 0 {
                regions.add(change);
                pages.extend(change.start.0..change.end.0);
            } else {
                regions.remove(change);
                pages.retain(|page| !(change.start.0..change.end.0).contains(page));
            }
            let listed: Vec<u64> = regions
                .ranges()
                .iter()
                .flat_map(|r| r.start.0..r.end.0)
                .collect();
            assert_eq!(listed, pages.iter().copied().collect::<Vec<_>>());
            assert!(
                regions
                    .ranges()
                    .windows(2)
                    .all(|two| two[0].end < two[1].start)
            );
            let probe = range(next(60), 70);
            let uncovered: Vec<u64> = regions
                .uncovered(probe)
                .iter()
                .flat_map(|r| r.start.0..r.end.0)
                .collect();
            let expected: Vec<u64> = (probe.start.0..70)
                .filter(|page| !pages.contains(page))
                .collect();
            assert_eq!(uncovered, expected);
            let covered: Vec<u64> = regions
                .covered(probe)
                .iter()
                .flat_map(|r| r.start.0..r.end.0)
                .collect();
            let expected: Vec<u64> = pages.range(probe.start.0..70).copied().collect();
            assert_eq!(covered, expected);
            let page = next(70);
            assert_eq!(
                regions.containing(VirtualPage(page)).is_some(),
                pages.contains(&page)
            );
        }
    }
}
