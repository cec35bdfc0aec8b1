//! Reordering of events.
//!
//! A system call drops the mmap lock before it queues its event. So events of several threads may be
//! read in an order other than that of the changes, and page states of one mapping would be taken for
//! those of another at the same address. Two rules prevent that:
//!
//! * Events are collected until the kernel reports that no change is in progress, so that none is
//!   missing. Until then the kernel refuses to change pages anyway.
//! * They are applied in an order in which each was possible: a range can only move *to* an unmanaged
//!   range.
//!
//! mremap raises a remap event and then an unmap event of its source range. The latter, the **echo**,
//! carries no information, and something else may be mapped there by then.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;

/// A change of mappings, as an event reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// munmap and everything else that unmaps.
    Unmap(PageRange),
    /// `madvise` drops the pages of the range.
    Remove(PageRange),
    /// mremap.
    Remap {
        /// Source range.
        from: PageRange,
        /// First page of the target range.
        to: VirtualPage,
        /// No echo was read. If all events were read, the source mapping stayed behind, empty
        /// (`MREMAP_DONTUNMAP`).
        stays: bool,
    },
    /// A fork, by its number among those of the address space.
    Fork(u64),
}

impl Change {
    /// Whether the order in which it is applied matters.
    pub(crate) fn needs_order(self) -> bool {
        !matches!(self, Change::Remove(_))
    }
}

/// Changes that were read and wait to be applied. Part of `Changes`, used inside the exclusive gate.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// In the order in which they were read.
    pending: Vec<Change>,
    /// Source ranges of moves whose echo was not read yet.
    echoes: Vec<PageRange>,
}

impl Order {
    /// Adds a change that was read. The events of one thread arrive in order, so an echo follows its
    /// move.
    pub(crate) fn push(&mut self, change: Change) {
        match change {
            Change::Unmap(_) if Bug::EchoesApplied.is_back() => {}
            Change::Unmap(range) => {
                if let Some(index) = self.echoes.iter().position(|echo| *echo == range) {
                    self.echoes.swap_remove(index);
                    self.note_echo(range);
                    return;
                }
                if let Some(index) = self
                    .echoes
                    .iter()
                    .position(|echo| self.shrank(*echo, range))
                {
                    let reported = self.echoes.swap_remove(index);
                    self.shorten(reported, range);
                    self.note_echo(range);
                    return;
                }
            }
            Change::Remap { from, .. } => self.echoes.push(from),
            Change::Remove(_) | Change::Fork(_) => {}
        }
        self.pending.push(change);
    }

    /// Whether the move reported for `reported` moved only `left`. Before Linux 6.15, a shrinking
    /// mremap reports the old length, then the unmapping of the rest, then an echo of the range that
    /// moved.
    fn shrank(&self, reported: PageRange, left: PageRange) -> bool {
        let rest = PageRange {
            start: left.end,
            end: reported.end,
        };
        left.start == reported.start
            && !rest.is_empty()
            && self.pending.contains(&Change::Unmap(rest))
    }

    fn shorten(&mut self, reported: PageRange, left: PageRange) {
        let mut moves = self.moves();
        if let Some((from, _)) = moves.find(|(from, _)| **from == reported) {
            *from = left;
        }
    }

    fn note_echo(&mut self, echo: PageRange) {
        let mut moves = self.moves();
        if let Some((_, stays)) = moves.find(|(from, stays)| **from == echo && **stays) {
            *stays = false;
        }
    }

    /// The source range and `stays` of each pending move.
    fn moves(&mut self) -> impl Iterator<Item = (&mut PageRange, &mut bool)> {
        self.pending.iter_mut().filter_map(|change| match change {
            Change::Remap { from, stays, .. } => Some((from, stays)),
            _ => None,
        })
    }

    /// Whether changes wait to be applied.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The number of `madvise` events that wait to be applied.
    pub(crate) fn removals(&self) -> u32 {
        let is_removal = |change: &&Change| matches!(change, Change::Remove(_));
        self.pending.iter().filter(is_removal).count() as u32
    }

    /// The numbers of the forks that wait to be applied.
    pub(crate) fn forks(&self) -> impl Iterator<Item = u64> {
        self.pending.iter().filter_map(|change| match change {
            Change::Fork(number) => Some(*number),
            _ => None,
        })
    }

    /// The next change to apply, given the managed ranges. If `quiet`, no more events will come, so
    /// missing echoes never will.
    pub(crate) fn next(&mut self, regions: &RangeSet, quiet: bool) -> Option<Change> {
        if !self.pending.is_empty() {
            let index = self.next_index(regions);
            return Some(self.pending.remove(index));
        }
        if quiet {
            // All echoes were read; a move whose mapping stays behind has none.
            self.echoes.clear();
        }
        None
    }

    /// The index of the first pending change that is possible.
    fn next_index(&self, regions: &RangeSet) -> usize {
        let mut awaited = Vec::new();
        if Bug::EventsInReadOrder.is_back() {
            return 0;
        }
        for (index, change) in self.pending.iter().enumerate() {
            let possible = match *change {
                Change::Remap { from, to, .. } => {
                    let target = from.moved(from.start, to);
                    awaited.push(target);
                    regions.uncovered(target) == [target]
                }
                // A move may wait for the unmapping.
                Change::Unmap(_) => true,
                // A `madvise` on the target of a pending move drops the moved pages: the previous
                // mapping left earlier, and its event comes later. A `madvise` after a fork does not
                // affect the child.
                Change::Remove(range) => {
                    let free = |target: &PageRange| target.intersection(range).is_empty();
                    awaited.iter().all(free) && !self.has_fork_before(index)
                }
                // The child inherits the result of all changes that were read earlier.
                Change::Fork(_) => index == 0,
            };
            if possible {
                return index;
            }
        }
        0
    }

    fn has_fork_before(&self, index: usize) -> bool {
        let is_fork = |change: &Change| matches!(change, Change::Fork(_));
        self.pending[..index].iter().any(is_fork)
    }
}

/// Fuzz target: arbitrary sequences of events.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing {
    use super::{Change, Order};
    use crate::page::{PageRange, VirtualPage};
    use crate::range_set::RangeSet;

    /// Every four bytes of the input read an event or apply pending ones. Checks that every event
    /// except echoes is applied once, forks in order, and each fork after all events that were read
    /// before it.
    pub fn events(input: &[u8]) {
        let mut order = Order::default();
        let mut regions = RangeSet::default();
        let mut applied = Applied::default();
        for step in input.chunks_exact(4) {
            let range = range(step[1], step[2]);
            match step[0] % 8 {
                0 => regions.add(range),
                1 | 2 => applied.read(&mut order, Change::Unmap(range)),
                3 => applied.read(&mut order, Change::Remove(range)),
                4 | 5 => applied.read(
                    &mut order,
                    Change::Remap {
                        from: range,
                        to: VirtualPage(u64::from(step[3])),
                        stays: true,
                    },
                ),
                6 => applied.read(&mut order, Change::Fork(applied.forks_read)),
                _ => applied.apply(
                    &mut order,
                    &mut regions,
                    usize::from(step[1]),
                    step[2] > 127,
                ),
            }
        }
        applied.apply(&mut order, &mut regions, usize::MAX, true);
        assert!(!order.is_waiting() && order.next(&regions, true).is_none());
        assert_eq!(applied.forks, applied.forks_read);
        assert!(
            order.echoes.is_empty(),
            "echoes are not waited for for ever"
        );
    }

    /// Short ranges at few addresses, so that they overlap.
    fn range(start: u8, length: u8) -> PageRange {
        let start = VirtualPage(u64::from(start));
        PageRange {
            start,
            end: start.plus(u64::from(length % 32)),
        }
    }

    #[derive(Default)]
    struct Applied {
        forks_read: u64,
        forks: u64,
        waiting: usize,
    }

    impl Applied {
        fn read(&mut self, order: &mut Order, change: Change) {
            order.push(change);
            let is_echo = order.pending.len() == self.waiting;
            if is_echo {
                assert!(
                    matches!(change, Change::Unmap(_)),
                    "only an unmapping can be an echo"
                );
            }
            self.waiting = order.pending.len();
            if let Change::Fork(number) = change {
                assert_eq!(number, self.forks_read);
                self.forks_read += 1;
            }
        }

        fn apply(&mut self, order: &mut Order, regions: &mut RangeSet, most: usize, quiet: bool) {
            for _ in 0..most {
                let before = order.pending.clone();
                let Some(change) = order.next(regions, quiet) else {
                    assert!(before.is_empty());
                    return;
                };
                self.waiting -= 1;
                assert_eq!(order.pending.len(), self.waiting);
                match change {
                    Change::Unmap(range) => regions.remove(range),
                    Change::Remap { from, to, stays } => {
                        let target = from.moved(from.start, to);
                        let managed = regions.covered(from);
                        if !stays {
                            regions.remove(from);
                        }
                        managed
                            .iter()
                            .for_each(|part| regions.add(part.moved(from.start, to)));
                        assert_eq!(target.pages(), from.pages());
                    }
                    Change::Remove(_) => {
                        let index = before.iter().position(|one| *one == change);
                        let index = index.expect("it was waiting");
                        let is_fork = |one: &Change| matches!(one, Change::Fork(_));
                        assert!(!before[..index].iter().any(is_fork), "the child sees it");
                    }
                    Change::Fork(number) => {
                        assert_eq!(number, self.forks, "forks come in their order");
                        assert_eq!(before[0], change, "what was read before is in the child");
                        self.forks += 1;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    fn remap(from: u64, to: u64) -> Change {
        Change::Remap {
            from: range(from, from + 10),
            to: VirtualPage(to),
            stays: true,
        }
    }

    /// Applies all changes as the pager does, to pairs of start page and contents.
    fn apply(mut places: Vec<(u64, char)>, changes: &[Change]) -> Vec<(u64, char)> {
        let mut order = Order::default();
        let mut regions = RangeSet::default();
        for (place, _) in &places {
            regions.add(range(*place, place + 10));
        }
        changes.iter().for_each(|change| order.push(*change));
        while let Some(change) = order.next(&regions, true) {
            match change {
                Change::Unmap(range) => {
                    regions.remove(range);
                    places.retain(|(place, _)| *place != range.start.0);
                }
                Change::Remap { from, to, .. } => {
                    regions.remove(from);
                    regions.add(range(to.0, to.0 + 10));
                    for (place, _) in &mut places {
                        if *place == from.start.0 {
                            *place = to.0;
                        }
                    }
                }
                Change::Remove(_) | Change::Fork(_) => {}
            }
        }
        places.sort_unstable();
        places
    }

    #[test]
    fn the_order_read_is_kept_where_it_is_possible() {
        let changes = [
            remap(100, 300),
            Change::Unmap(range(100, 110)),
            Change::Unmap(range(300, 310)),
        ];
        assert_eq!(apply(vec![(100, 'a'), (200, 'b')], &changes), [(200, 'b')]);
    }

    #[test]
    fn a_late_departure_goes_first() {
        // a: 100 to 300, then b: 200 to 100; read the other way round, echoes last.
        let changes = [
            remap(200, 100),
            remap(100, 300),
            Change::Unmap(range(100, 110)),
            Change::Unmap(range(200, 210)),
        ];
        assert_eq!(
            apply(vec![(100, 'a'), (200, 'b')], &changes),
            [(100, 'b'), (300, 'a')]
        );
    }

    #[test]
    fn what_is_dropped_after_a_move_is_not_dropped_before() {
        // a: 100 to 300, whose event comes last; b: 200 to 100, of which pages are dropped then.
        let dropped = Change::Remove(range(102, 104));
        let elsewhere = Change::Remove(range(400, 402));
        let mut order = Order::default();
        let read = [remap(200, 100), dropped, elsewhere, remap(100, 300)];
        read.iter().for_each(|change| order.push(*change));
        let mut regions = RangeSet::default();
        for start in [100, 200, 400] {
            regions.add(range(start, start + 10));
        }
        let mut applied = Vec::new();
        while let Some(change) = order.next(&regions, true) {
            if let Change::Remap { from, to, .. } = change {
                regions.remove(from);
                regions.add(range(to.0, to.0 + 10));
            }
            applied.push(change);
        }
        assert_eq!(
            applied,
            [elsewhere, remap(100, 300), remap(200, 100), dropped]
        );
    }

    #[test]
    fn a_late_unmapping_goes_first() {
        let changes = [
            remap(200, 100),
            Change::Unmap(range(200, 210)),
            Change::Unmap(range(100, 110)),
        ];
        assert_eq!(apply(vec![(100, 'a'), (200, 'b')], &changes), [(100, 'b')]);
    }

    #[test]
    fn a_move_without_an_echo_leaves_its_mapping() {
        let mut order = Order::default();
        let read = [
            remap(100, 300),
            remap(200, 100),
            Change::Unmap(range(100, 110)),
            remap(100, 400),
        ];
        read.iter().for_each(|change| order.push(*change));
        let mut stays = order.moves().map(|(_, stays)| *stays);
        assert_eq!(
            [(); 3].map(|()| stays.next()),
            [false, true, true].map(Some)
        );
    }

    #[test]
    fn an_echo_and_an_unmapping_of_the_same_range_are_two() {
        // a moves off, b moves in, b is unmapped, c moves in.
        let changes = [
            remap(100, 300),
            remap(200, 100),
            Change::Unmap(range(100, 110)),
            remap(400, 100),
            Change::Unmap(range(100, 110)),
            Change::Unmap(range(200, 210)),
            Change::Unmap(range(400, 410)),
        ];
        let places = vec![(100, 'a'), (200, 'b'), (400, 'c')];
        assert_eq!(apply(places, &changes), [(100, 'c'), (300, 'a')]);
    }

    #[test]
    fn an_echo_is_known_in_the_next_batch() {
        let mut regions = RangeSet::default();
        regions.add(range(100, 110));
        let mut order = Order::default();
        order.push(remap(100, 300));
        assert_eq!(order.next(&regions, false), Some(remap(100, 300)));
        assert_eq!(order.next(&regions, false), None);
        order.push(Change::Unmap(range(100, 110)));
        assert_eq!(order.next(&regions, true), None);
        // All echoes were read, so this is an unmapping.
        order.push(Change::Unmap(range(100, 110)));
        assert_eq!(
            order.next(&regions, true),
            Some(Change::Unmap(range(100, 110)))
        );
    }

    #[test]
    fn a_fork_waits_for_what_was_read_before() {
        let mut regions = RangeSet::default();
        regions.add(range(100, 110));
        regions.add(range(200, 210));
        let mut order = Order::default();
        for change in [remap(200, 100), Change::Fork(0), remap(100, 300)] {
            order.push(change);
        }
        assert_eq!(order.next(&regions, true), Some(remap(100, 300)));
        regions.remove(range(100, 110));
        assert_eq!(order.next(&regions, true), Some(remap(200, 100)));
        assert_eq!(order.next(&regions, true), Some(Change::Fork(0)));
    }

    #[test]
    fn a_move_that_shrinks_is_as_long_as_its_echo() {
        // a shrinks and moves; b lies after its target. The event has the old length or the new one.
        for reported in [range(100, 120), range(100, 110)] {
            let mut regions = RangeSet::default();
            regions.add(range(100, 120));
            regions.add(range(310, 320));
            let mut order = Order::default();
            let change = |from, stays| Change::Remap {
                from,
                to: VirtualPage(300),
                stays,
            };
            order.push(change(reported, true));
            order.push(Change::Unmap(range(110, 120)));
            order.push(Change::Unmap(range(100, 110)));
            let moved = Some(change(range(100, 110), false));
            assert_eq!(order.next(&regions, true), moved);
            let rest = Some(Change::Unmap(range(110, 120)));
            assert_eq!(order.next(&regions, true), rest);
            assert_eq!(order.next(&regions, true), None);
        }
        // An unmapping of a part of the source range that is not an echo.
        let mut order = Order::default();
        order.push(remap(100, 300));
        order.push(Change::Unmap(range(100, 105)));
        let order = [(); 2].map(|()| order.next(&RangeSet::default(), false));
        let other = Change::Unmap(range(100, 105));
        assert_eq!(order, [Some(remap(100, 300)), Some(other)]);
    }

    /// Every order in which two threads' events can be read has the same result.
    #[test]
    fn all_interleavings_of_a_swap_agree() {
        let a = [remap(100, 300), Change::Unmap(range(100, 110))];
        let b = [remap(200, 100), Change::Unmap(range(200, 210))];
        for mask in 0u32..16 {
            if mask.count_ones() != 2 {
                continue;
            }
            let (mut next_a, mut next_b) = (a.iter(), b.iter());
            let changes: Vec<Change> = (0..4)
                .filter_map(|bit| {
                    if mask >> bit & 1 == 0 {
                        next_a.next()
                    } else {
                        next_b.next()
                    }
                })
                .copied()
                .collect();
            let found = apply(vec![(100, 'a'), (200, 'b')], &changes);
            assert_eq!(found, [(100, 'b'), (300, 'a')], "{changes:?}");
        }
    }
}
