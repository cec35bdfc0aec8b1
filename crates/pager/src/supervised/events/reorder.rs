//! The order of events.
//!
//! A system call that changes mappings gives up its locks before it queues its event. So with
//! several threads the events can be read in another order than that in which the mappings
//! changed, and the page states of one mapping would be taken for those of another at the same
//! address. Two things set it right:
//!
//! * events are collected until the kernel says that no change is under way, so that nothing is
//!   missing (until then it refuses to change pages anyway);
//! * they are applied in an order in which each was possible: a range can only be moved *to* where
//!   nothing is managed any more.
//!
//! `mremap` reports its move first and then the unmapping of where it came from; the second, the
//! **echo**, says nothing new, and by then something else may lie there.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;

/// A change of mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Unmap(PageRange),
    Remove(PageRange),
    Remap {
        from: PageRange,
        to: VirtualPage,
        /// No echo was read: if all was, the mapping stayed behind, empty (`MREMAP_DONTUNMAP`). (If one
        /// was, it may as well have been unmapped since.)
        stays: bool,
    },
    /// The number of the fork among those of the address space.
    Fork(u64),
}

impl Change {
    /// Whether the order in which it is applied matters.
    pub fn needs_order(self) -> bool {
        !matches!(self, Change::Remove(_))
    }
}

/// Changes that were read and wait to be applied.
#[derive(Debug, Default)]
pub struct Order {
    pending: Vec<Change>,
    echoes: Vec<PageRange>,
}

impl Order {
    /// Adds a change as it is read. A thread's own events come in their order, so an echo comes
    /// behind its move.
    pub fn push(&mut self, change: Change) {
        match change {
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

    /// Whether a move that was reported of `reported` was of `left` alone: one that shrinks what it
    /// moves is reported in full length before Linux 6.15, and the unmapping of the rest before the
    /// echo.
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

    /// From where, and whether the mapping stays behind, of the moves that wait to be applied.
    fn moves(&mut self) -> impl Iterator<Item = (&mut PageRange, &mut bool)> {
        self.pending.iter_mut().filter_map(|change| match change {
            Change::Remap { from, stays, .. } => Some((from, stays)),
            _ => None,
        })
    }

    /// Whether changes wait to be applied.
    pub fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Whether a fork waits to be applied.
    pub fn has_fork(&self) -> bool {
        self.has_fork_before(self.pending.len())
    }

    /// The next change to apply, given what is managed by now. `quiet` says that nothing more is
    /// to come; echoes that have not come by then never will.
    pub fn next(&mut self, regions: &RangeSet, quiet: bool) -> Option<Change> {
        if !self.pending.is_empty() {
            let index = self.next_index(regions);
            return Some(self.pending.remove(index));
        }
        if quiet {
            // All echoes have been read; a move that left its mapping behind has none.
            self.echoes.clear();
        }
        None
    }

    /// The first of the pending changes that is possible.
    fn next_index(&self, regions: &RangeSet) -> usize {
        let mut awaited = Vec::new();
        for (index, change) in self.pending.iter().enumerate() {
            let possible = match *change {
                Change::Remap { from, to, .. } => {
                    let target = from.moved(from.start, to);
                    awaited.push(target);
                    regions.uncovered(target) == [target]
                }
                // It may be what a move waits for.
                Change::Unmap(_) => true,
                // Whoever drops pages where a move goes to means what was moved there: what lay
                // there before left earlier, and its event is yet to come. Nor does a child see
                // what was dropped behind its fork.
                Change::Remove(range) => {
                    let free = |target: &PageRange| target.intersection(range).is_empty();
                    awaited.iter().all(free) && !self.has_fork_before(index)
                }
                // The child has what was there before: nothing read earlier may be left out.
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

/// Events as they may be read, whatever a program does to its mappings.
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing {
    use super::{Change, Order};
    use crate::page::{PageRange, VirtualPage};
    use crate::range_set::RangeSet;

    /// Each four bytes are an event that is read, or have the next ones applied. None is lost or comes
    /// twice but for echoes, forks come in their order, and before them all that was read before.
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

    /// Short ranges at few places, so that they meet.
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
                    "only an unmapping can be one"
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

    /// Applies all changes as the pager does, to `(place, contents)` pairs.
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
        // By now all echoes were read: this one is a real one.
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
        // a shrinks and moves; behind its target there is b. Reported in full, and as it was.
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
        // A part of where something moved from, unmapped for another reason.
        let mut order = Order::default();
        order.push(remap(100, 300));
        order.push(Change::Unmap(range(100, 105)));
        let order = [(); 2].map(|()| order.next(&RangeSet::default(), false));
        let other = Change::Unmap(range(100, 105));
        assert_eq!(order, [Some(remap(100, 300)), Some(other)]);
    }

    /// Every order in which two threads' events can be read gives what happened.
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
