//! Which of its parent's mapping changes a forked child contains.
//!
//! The kernel serializes changes and forks, but the events of several threads may be read in another
//! order. Changes of disjoint ranges may even be read on both sides of a fork although the child
//! contains both, or neither. The order of changes with overlapping ranges is known
//! (`events/reorder.rs`), and the child contains a prefix of them. So for each group of such changes,
//! the mappings and resident pages after every prefix are compared with those of the child.
//!
//! Residency is the strongest evidence: an untracked page adds the same error to every candidate, so it
//! cancels out. Next are the readable and writable mappings, because a range that was unmapped may
//! still be registered, or registered again.
//!
//! Several prefixes may match: if no page is resident, a move between two mappings that both stay
//! (`MREMAP_DONTUNMAP`) cannot be detected. Then the order in which the events were read decides. It is
//! that of the changes unless a thread was preempted between its change and its event.

use crate::bugs::Bug;
use crate::page::PageRange;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;

/// A change applied concurrently with a fork.
#[derive(Clone)]
pub(crate) struct RecordedChange {
    /// The change.
    pub change: Change,
    /// Pages of its range that were resident before, as far as was known.
    pub resident: RangeSet,
}

/// The parent's mappings at one point of the history, as far as they are known.
#[derive(Clone, Default)]
pub(crate) struct Mapped {
    /// Registered ranges.
    pub registered: RangeSet,
    /// Resident pages.
    pub present: RangeSet,
}

/// The child's mappings.
#[derive(Default)]
pub(crate) struct ChildMappings {
    /// Registered ranges.
    pub registered: RangeSet,
    /// Registered ranges that are readable and writable.
    pub usable: RangeSet,
    /// Registered ranges with `MADV_WIPEONFORK`.
    pub wiped: RangeSet,
    /// Resident pages of registered ranges.
    pub present: RangeSet,
}

impl RecordedChange {
    /// The ranges that the change affects.
    pub(crate) fn ranges(&self) -> Vec<PageRange> {
        match self.change {
            Change::Unmap(range) => vec![range],
            Change::Remap { from, to, .. } => vec![from, from.moved(from.start, to)],
            Change::Remove(_) | Change::Fork(_) => Vec::new(),
        }
    }
}

/// Whether the child contains each change of a history, of which the first `forked_at` were applied
/// before the fork. `at_fork` are the parent's mappings at the fork, `child` those of the child; both
/// cover at least the ranges of all changes.
pub(crate) fn contained(
    history: &[RecordedChange],
    forked_at: usize,
    at_fork: &Mapped,
    child: &ChildMappings,
) -> Vec<bool> {
    let mut contained = vec![false; history.len()];
    if Bug::ForkTakenByReadOrder.is_back() {
        contained[..forked_at].fill(true);
        return contained;
    }
    for (footprint, members) in groups(history) {
        let changes: Vec<&RecordedChange> = members.iter().map(|index| &history[*index]).collect();
        let before = members.partition_point(|index| *index < forked_at);
        let group = Group {
            at_fork: Mapped {
                registered: within(&footprint, &at_fork.registered),
                present: within(&footprint, &at_fork.present),
            },
            child: ChildMappings {
                registered: within(&footprint, &child.registered),
                usable: within(&footprint, &child.usable),
                wiped: within(&footprint, &child.wiped),
                present: within(&footprint, &child.present),
            },
            changes,
            before,
        };
        let count = group.contained();
        for index in &members[..count] {
            contained[*index] = true;
        }
    }
    contained
}

/// Groups of changes with overlapping ranges: the union of the ranges, and the indices in the history.
fn groups(history: &[RecordedChange]) -> Vec<(RangeSet, Vec<usize>)> {
    let mut groups: Vec<(RangeSet, Vec<usize>)> = Vec::new();
    for (index, recorded) in history.iter().enumerate() {
        let (mut footprint, mut members) = (RangeSet::default(), vec![index]);
        let ranges = recorded.ranges();
        groups.retain(|(other, others)| {
            let touches = ranges.iter().any(|range| !other.covered(*range).is_empty());
            if touches {
                footprint.add_all(other);
                members.extend(others);
            }
            !touches
        });
        ranges.iter().for_each(|range| footprint.add(*range));
        members.sort_unstable();
        groups.push((footprint, members));
    }
    groups
}

struct Group<'a> {
    changes: Vec<&'a RecordedChange>,
    /// Number of changes applied before the fork.
    before: usize,
    at_fork: Mapped,
    child: ChildMappings,
}

/// Number of pages in which the child differs from a candidate. Compared in the order of the fields.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Difference {
    present: u64,
    usable: u64,
    registered: u64,
    /// Registered pages that are explained only by a mapping that stayed behind although its echo was
    /// read: its unmapping would have to have been taken for the echo.
    left_behind: u64,
}

impl Group<'_> {
    /// The number of changes that the child contains.
    fn contained(&self) -> usize {
        let mut mapped = self.at_fork.clone();
        let mut differences = vec![Difference::default(); self.changes.len() + 1];
        for count in (0..=self.before).rev() {
            differences[count] = self.difference(&mapped, count);
            if let Some(last) = count.checked_sub(1) {
                mapped.undo(self.changes[last]);
            }
        }
        mapped = self.at_fork.clone();
        for count in self.before..self.changes.len() {
            mapped.apply(self.changes[count]);
            differences[count + 1] = self.difference(&mapped, count + 1);
        }
        let counts = 0..=self.changes.len();
        // mremap over another mapping raises two events, the unmapping first, and no fork can come
        // between them. So of two candidates at the same distance, the later one is more likely.
        let by_likelihood = |count: &usize| {
            let distance = count.abs_diff(self.before);
            (differences[*count], distance, *count < self.before)
        };
        counts.min_by_key(by_likelihood).unwrap_or(self.before)
    }

    /// The difference between the child and `mapped`, the mappings after `count` changes.
    fn difference(&self, mapped: &Mapped, count: usize) -> Difference {
        // The source mapping of a move may still exist, empty.
        let mut left = RangeSet::default();
        for recorded in &self.changes[..count] {
            if let Change::Remap { from, to, .. } = recorded.change {
                left.remove(from.moved(from.start, to));
                left.add(from);
            }
        }
        let of = |child: &RangeSet| {
            let unexpected = outside(child, &mapped.registered);
            pages(&outside(&unexpected, &left)) + pages(&outside(&mapped.registered, child))
        };
        let child = &self.child;
        let missing = outside(&mapped.present, &child.present);
        Difference {
            present: pages(&outside(&child.present, &mapped.present))
                + pages(&outside(&missing, &child.wiped)),
            usable: of(&child.usable),
            registered: of(&child.registered),
            left_behind: pages(&within(
                &outside(&child.registered, &mapped.registered),
                &left,
            )),
        }
    }
}

impl Mapped {
    fn apply(&mut self, recorded: &RecordedChange) {
        match recorded.change {
            Change::Unmap(range) => {
                self.registered.remove(range);
                self.present.remove(range);
            }
            Change::Remap { from, to, stays } => {
                let target = from.moved(from.start, to);
                if !stays {
                    self.registered.remove(from);
                }
                self.registered.add(target);
                self.present.remove(from);
                self.present.remove(target);
                for range in recorded.resident.ranges() {
                    self.present.add(range.moved(from.start, to));
                }
            }
            Change::Remove(_) | Change::Fork(_) => {}
        }
    }

    fn undo(&mut self, recorded: &RecordedChange) {
        match recorded.change {
            Change::Unmap(range) => {
                self.registered.add(range);
                self.present.remove(range);
            }
            Change::Remap { from, to, .. } => {
                let target = from.moved(from.start, to);
                self.registered.remove(target);
                self.registered.add(from);
                self.present.remove(target);
                self.present.remove(from);
            }
            Change::Remove(_) | Change::Fork(_) => {}
        }
        for range in recorded.resident.ranges() {
            self.present.add(*range);
        }
    }
}

/// The intersection of both sets.
fn within(footprint: &RangeSet, regions: &RangeSet) -> RangeSet {
    let parts = footprint.ranges().iter();
    collect(parts.flat_map(|range| regions.covered(*range)))
}

/// The pages of `regions` that are not in `others`.
fn outside(regions: &RangeSet, others: &RangeSet) -> RangeSet {
    let parts = regions.ranges().iter();
    collect(parts.flat_map(|range| others.uncovered(*range)))
}

fn collect(ranges: impl Iterator<Item = PageRange>) -> RangeSet {
    let mut regions = RangeSet::default();
    ranges.for_each(|range| regions.add(range));
    regions
}

fn pages(regions: &RangeSet) -> u64 {
    regions.ranges().iter().map(|range| range.pages()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{VirtualPage, range};

    fn regions(ranges: &[(u64, u64)]) -> RangeSet {
        let mut regions = RangeSet::default();
        for &(start, end) in ranges {
            regions.add(range(start, end));
        }
        regions
    }

    fn mapped(registered: &[(u64, u64)], present: &[(u64, u64)]) -> Mapped {
        Mapped {
            registered: regions(registered),
            present: regions(present),
        }
    }

    fn unmap(start: u64, end: u64, resident: &[(u64, u64)]) -> RecordedChange {
        RecordedChange {
            change: Change::Unmap(range(start, end)),
            resident: regions(resident),
        }
    }

    /// Calls `contained` for a child whose mappings are all readable and writable.
    fn saw(
        history: &[RecordedChange],
        forked_at: usize,
        at_fork: &Mapped,
        child: &Mapped,
    ) -> Vec<bool> {
        let Mapped {
            registered,
            present,
        } = child.clone();
        let child = ChildMappings {
            usable: registered.clone(),
            registered,
            present,
            wiped: RangeSet::default(),
        };
        contained(history, forked_at, at_fork, &child)
    }

    /// A move of ten pages.
    fn remap(from: u64, to: u64, stays: bool, resident: &[(u64, u64)]) -> RecordedChange {
        RecordedChange {
            change: Change::Remap {
                from: range(from, from + 10),
                to: VirtualPage(to),
                stays,
            },
            resident: regions(resident),
        }
    }

    #[test]
    fn changes_far_apart_are_seen_or_not_each() {
        let history = [unmap(0, 10, &[]), unmap(50, 60, &[]), unmap(100, 110, &[])];
        let at_fork = mapped(&[(50, 60), (100, 110)], &[]);
        let saw_the_second = mapped(&[(0, 10), (100, 110)], &[]);
        let contained = |child| saw(&history, 1, &at_fork, &child);
        assert_eq!(contained(saw_the_second), [false, true, false]);
        assert_eq!(contained(at_fork.clone()), [true, false, false]);
        assert_eq!(contained(mapped(&[], &[])), [true; 3]);
    }

    #[test]
    fn memory_that_moved_on_before_is_not_where_it_moved_from() {
        // a: 0 to 20, to 40; and b: 60 to 0, read after the fork.
        let history = [
            remap(0, 20, false, &[]),
            remap(20, 40, false, &[]),
            remap(60, 0, false, &[]),
        ];
        let at_fork = mapped(&[(0, 10), (60, 70)], &[]);
        for (child, count) in [(0, 0), (20, 1), (40, 2)] {
            let child = mapped(&[(child, child + 10), (60, 70)], &[]);
            let mut expected = [true; 3];
            expected[count..].fill(false);
            assert_eq!(saw(&history, 0, &at_fork, &child), expected);
        }
        let child = mapped(&[(40, 50), (0, 10)], &[]);
        assert_eq!(saw(&history, 0, &at_fork, &child), [true; 3]);
    }

    #[test]
    fn a_mapping_that_moved_away_is_not_taken_to_have_stayed() {
        // Moved over another and back, then unmapped; nothing resident. The child is of the middle.
        let history = [
            unmap(20, 30, &[]),
            remap(0, 20, false, &[]),
            remap(20, 0, false, &[]),
            unmap(0, 10, &[]),
        ];
        let child = mapped(&[(20, 30)], &[]);
        let contained = saw(&history, 4, &Mapped::default(), &child);
        assert_eq!(contained, [true, true, false, false]);
    }

    #[test]
    fn what_was_in_memory_tells_whether_it_moved_to_where_another_was() {
        // The target mapping has page 20 resident; the source has page 3 or none.
        let over = |moving: &[(u64, u64)]| [unmap(20, 30, &[(20, 21)]), remap(0, 20, true, moving)];
        let both = [(0, 10), (20, 30)];
        for forked_at in 0..=2 {
            for moving in [&[(3, 4)][..], &[]] {
                let history = over(moving);
                let mut at_fork = mapped(&both, &[(20, 21)]);
                moving
                    .iter()
                    .for_each(|(start, end)| at_fork.present.add(range(*start, *end)));
                let before = at_fork.clone();
                history[..forked_at]
                    .iter()
                    .for_each(|recorded| at_fork.apply(recorded));
                assert_eq!(saw(&history, forked_at, &at_fork, &before), [false; 2]);
                let moved: Vec<_> = moving.iter().map(|(s, e)| (s + 20, e + 20)).collect();
                let after = mapped(&both, &moved);
                assert_eq!(saw(&history, forked_at, &at_fork, &after), [true; 2]);
            }
        }
    }

    #[test]
    fn where_nothing_tells_the_order_does() {
        let history = [unmap(20, 30, &[]), remap(0, 20, true, &[])];
        let both = [(0, 10), (20, 30)];
        let child = mapped(&both, &[]);
        assert_eq!(saw(&history, 0, &child, &child), [false; 2]);
        let between = mapped(&[(0, 10)], &[]);
        assert_eq!(saw(&history, 1, &between, &child), [true; 2]);
        assert_eq!(saw(&history, 2, &child, &child), [true; 2]);
    }

    #[test]
    fn an_end_that_was_taken_for_an_echo_is_seen_or_not() {
        // The mapping stays behind and is unmapped right after; the fork came in between.
        let history = [remap(0, 20, false, &[(0, 10)])];
        let at_fork = mapped(&[(0, 10)], &[(0, 10)]);
        let child = mapped(&[(0, 10), (20, 30)], &[(20, 30)]);
        assert_eq!(saw(&history, 0, &at_fork, &child), [true]);
    }

    #[test]
    fn back_and_forth_is_told_by_where_it_is() {
        // A move and back, then another to the place in between; all read after the fork.
        let history = [
            remap(0, 20, true, &[(0, 10)]),
            remap(20, 0, false, &[(20, 30)]),
            remap(70, 60, false, &[]),
            remap(60, 20, true, &[]),
        ];
        let at_fork = mapped(&[(0, 10), (70, 80)], &[(0, 10)]);
        let away = mapped(&[(0, 10), (20, 30), (70, 80)], &[(20, 30)]);
        let contained = |child: &Mapped| saw(&history, 0, &at_fork, child);
        assert_eq!(contained(&away), [true, false, false, false]);
        assert_eq!(contained(&at_fork), [false; 4]);
    }

    #[test]
    fn what_cannot_be_used_any_more_is_not_what_moved() {
        // The target is registered although not usable: something else was mapped there.
        for resident in [&[(0, 10)][..], &[]] {
            let history = [remap(0, 20, false, resident)];
            let at_fork = mapped(&[(0, 10)], resident);
            let child = ChildMappings {
                registered: regions(&[(0, 10), (20, 30)]),
                usable: regions(&[(0, 10)]),
                present: regions(resident),
                wiped: RangeSet::default(),
            };
            assert_eq!(contained(&history, 0, &at_fork, &child), [false]);
            assert_eq!(
                contained(&history, 1, &mapped(&[(20, 30)], &[]), &child),
                [false]
            );
        }
    }

    #[test]
    fn what_the_fork_wiped_tells_nothing() {
        // The range at 20 is wiped on fork and resident in the parent; the range that moves over it is
        // swapped out.
        let history = [unmap(20, 30, &[(20, 30)]), remap(0, 20, false, &[])];
        let child = ChildMappings {
            registered: regions(&[(0, 10), (20, 30)]),
            usable: regions(&[(0, 10), (20, 30)]),
            wiped: regions(&[(20, 30)]),
            present: RangeSet::default(),
        };
        let before_both = mapped(&[(0, 10), (20, 30)], &[(20, 30)]);
        assert_eq!(contained(&history, 0, &before_both, &child), [false; 2]);
    }
}
