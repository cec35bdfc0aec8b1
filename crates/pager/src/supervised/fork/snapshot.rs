//! Which of its parent's changes of the mappings a forked child saw.
//!
//! The kernel makes changes one after the other, and a fork is at one place among them; but the events
//! of several threads may be read in another order. Changes that have nothing to do with each other
//! may even be read on both sides of the fork though the child saw none, or both. Of those that touch
//! one another's ranges the order is known (`order.rs`), and the child saw all up to one of them. So
//! for each such group, what would be mapped, and what of that in memory, after none of them, after one,
//! two and so on, is compared with what is mapped and in memory in the child.
//!
//! What is in memory tells most: of pages that are not known about there are as many too many or too few
//! in each case. What is mapped is compared with what may be read and written first, as what was given up
//! may be registered still, or again.
//!
//! Often several agree: of memory that is all out, whether it has moved between two mappings that both
//! stay (`MREMAP_DONTUNMAP`) cannot be seen. Then the order in which the events were read decides, which
//! is that of the changes unless a thread is interrupted right between the two.

use crate::page::PageRange;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;

/// A change that was applied beside a fork.
#[derive(Clone)]
pub struct Noted {
    pub change: Change,
    /// What of its range was in memory before, as far as was known.
    pub resident: RangeSet,
}

/// What is mapped at a moment, as far as is known.
#[derive(Clone, Default)]
pub struct Mapped {
    /// What is registered.
    pub registered: RangeSet,
    /// What is in memory.
    pub present: RangeSet,
}

/// What is mapped in the child.
#[derive(Default)]
pub struct Own {
    /// What is registered.
    pub registered: RangeSet,
    /// What of that can be read and written.
    pub usable: RangeSet,
    /// What of that was emptied by the fork, whatever was there.
    pub wiped: RangeSet,
    /// What of that is in memory.
    pub present: RangeSet,
}

impl Noted {
    /// The ranges that it changes.
    pub fn ranges(&self) -> Vec<PageRange> {
        match self.change {
            Change::Unmap(range) => vec![range],
            Change::Remap { from, to, .. } => vec![from, from.moved(from.start, to)],
            Change::Remove(_) | Change::Fork(_) => Vec::new(),
        }
    }
}

/// Whether the child saw each change of a history, of which the first so many were applied before the
/// fork. `at_fork` is what was known of the parent then, `own` what the child has, each of the ranges of
/// all changes at least.
pub fn seen(history: &[Noted], forked_at: usize, at_fork: &Mapped, own: &Own) -> Vec<bool> {
    let mut seen = vec![false; history.len()];
    for (footprint, members) in groups(history) {
        let changes: Vec<&Noted> = members.iter().map(|index| &history[*index]).collect();
        let before = members.partition_point(|index| *index < forked_at);
        let group = Group {
            at_fork: Mapped {
                registered: within(&footprint, &at_fork.registered),
                present: within(&footprint, &at_fork.present),
            },
            own: Own {
                registered: within(&footprint, &own.registered),
                usable: within(&footprint, &own.usable),
                wiped: within(&footprint, &own.wiped),
                present: within(&footprint, &own.present),
            },
            changes,
            before,
        };
        let count = group.seen();
        for index in &members[..count] {
            seen[*index] = true;
        }
    }
    seen
}

/// The changes that touch one another's ranges, by their places in the history, with all these ranges.
fn groups(history: &[Noted]) -> Vec<(RangeSet, Vec<usize>)> {
    let mut groups: Vec<(RangeSet, Vec<usize>)> = Vec::new();
    for (index, noted) in history.iter().enumerate() {
        let (mut footprint, mut members) = (RangeSet::default(), vec![index]);
        let ranges = noted.ranges();
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
    changes: Vec<&'a Noted>,
    /// So many of them were applied before the fork.
    before: usize,
    at_fork: Mapped,
    own: Own,
}

/// In how many pages the child differs from what would be mapped. The first counts most.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Difference {
    present: u64,
    usable: u64,
    registered: u64,
}

impl Group<'_> {
    /// How many of the changes the child saw.
    fn seen(&self) -> usize {
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
        // An `mremap` over another mapping is two events, of which the end of the other comes first:
        // between them there was no moment. So of two as far away, it is the later.
        let by_likelihood = |count: &usize| {
            let distance = count.abs_diff(self.before);
            (differences[*count], distance, *count < self.before)
        };
        counts.min_by_key(by_likelihood).unwrap_or(self.before)
    }

    /// Between the child and what would be mapped after so many changes.
    fn difference(&self, mapped: &Mapped, count: usize) -> Difference {
        // What a move left may be there still, and empty.
        let mut left = RangeSet::default();
        for noted in &self.changes[..count] {
            if let Change::Remap { from, to, .. } = noted.change {
                left.remove(from.moved(from.start, to));
                left.add(from);
            }
        }
        let of = |own: &RangeSet| {
            let unexpected = outside(own, &mapped.registered);
            pages(&outside(&unexpected, &left)) + pages(&outside(&mapped.registered, own))
        };
        let own = &self.own;
        let missing = outside(&mapped.present, &own.present);
        Difference {
            present: pages(&outside(&own.present, &mapped.present))
                + pages(&outside(&missing, &own.wiped)),
            usable: of(&own.usable),
            registered: of(&own.registered),
        }
    }
}

impl Mapped {
    fn apply(&mut self, noted: &Noted) {
        match noted.change {
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
                for range in noted.resident.ranges() {
                    self.present.add(range.moved(from.start, to));
                }
            }
            Change::Remove(_) | Change::Fork(_) => {}
        }
    }

    fn undo(&mut self, noted: &Noted) {
        match noted.change {
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
        for range in noted.resident.ranges() {
            self.present.add(*range);
        }
    }
}

/// What of some regions lies in a footprint.
fn within(footprint: &RangeSet, regions: &RangeSet) -> RangeSet {
    let parts = footprint.ranges().iter();
    collect(parts.flat_map(|range| regions.covered(*range)))
}

/// What of some regions is not in the others.
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

    fn unmap(start: u64, end: u64, resident: &[(u64, u64)]) -> Noted {
        Noted {
            change: Change::Unmap(range(start, end)),
            resident: regions(resident),
        }
    }

    /// Where all that the child has can be used.
    fn saw(history: &[Noted], forked_at: usize, at_fork: &Mapped, own: &Mapped) -> Vec<bool> {
        let Mapped {
            registered,
            present,
        } = own.clone();
        let own = Own {
            usable: registered.clone(),
            registered,
            present,
            wiped: RangeSet::default(),
        };
        seen(history, forked_at, at_fork, &own)
    }

    /// Of ten pages.
    fn remap(from: u64, to: u64, stays: bool, resident: &[(u64, u64)]) -> Noted {
        Noted {
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
        let seen = |own| saw(&history, 1, &at_fork, &own);
        assert_eq!(seen(saw_the_second), [false, true, false]);
        assert_eq!(seen(at_fork.clone()), [true, false, false]);
        assert_eq!(seen(mapped(&[], &[])), [true; 3]);
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
        for (own, count) in [(0, 0), (20, 1), (40, 2)] {
            let own = mapped(&[(own, own + 10), (60, 70)], &[]);
            let mut expected = [true; 3];
            expected[count..].fill(false);
            assert_eq!(saw(&history, 0, &at_fork, &own), expected);
        }
        let own = mapped(&[(40, 50), (0, 10)], &[]);
        assert_eq!(saw(&history, 0, &at_fork, &own), [true; 3]);
    }

    #[test]
    fn what_was_in_memory_tells_whether_it_moved_to_where_another_was() {
        // Over a mapping with the page at 20; of what moves, that at 3 is in memory, or nothing is.
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
                    .for_each(|noted| at_fork.apply(noted));
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
        let own = mapped(&both, &[]);
        assert_eq!(saw(&history, 0, &own, &own), [false; 2]);
        let between = mapped(&[(0, 10)], &[]);
        assert_eq!(saw(&history, 1, &between, &own), [true; 2]);
        assert_eq!(saw(&history, 2, &own, &own), [true; 2]);
    }

    #[test]
    fn an_end_that_was_taken_for_an_echo_is_seen_or_not() {
        // Left behind by the move, and unmapped right after: the child is of the moment between.
        let history = [remap(0, 20, false, &[(0, 10)])];
        let at_fork = mapped(&[(0, 10)], &[(0, 10)]);
        let own = mapped(&[(0, 10), (20, 30)], &[(20, 30)]);
        assert_eq!(saw(&history, 0, &at_fork, &own), [true]);
    }

    #[test]
    fn back_and_forth_is_told_by_where_it_is() {
        // Away and back, and what another moved to where it was; all read after the fork.
        let history = [
            remap(0, 20, true, &[(0, 10)]),
            remap(20, 0, false, &[(20, 30)]),
            remap(70, 60, false, &[]),
            remap(60, 20, true, &[]),
        ];
        let at_fork = mapped(&[(0, 10), (70, 80)], &[(0, 10)]);
        let away = mapped(&[(0, 10), (20, 30), (70, 80)], &[(20, 30)]);
        let seen = |own: &Mapped| saw(&history, 0, &at_fork, own);
        assert_eq!(seen(&away), [true, false, false, false]);
        assert_eq!(seen(&at_fork), [false; 4]);
    }

    #[test]
    fn what_cannot_be_used_any_more_is_not_what_moved() {
        // The target is registered again already, as something else was there when it was looked at.
        for resident in [&[(0, 10)][..], &[]] {
            let history = [remap(0, 20, false, resident)];
            let at_fork = mapped(&[(0, 10)], resident);
            let own = Own {
                registered: regions(&[(0, 10), (20, 30)]),
                usable: regions(&[(0, 10)]),
                present: regions(resident),
                wiped: RangeSet::default(),
            };
            assert_eq!(seen(&history, 0, &at_fork, &own), [false]);
            assert_eq!(seen(&history, 1, &mapped(&[(20, 30)], &[]), &own), [false]);
        }
    }

    #[test]
    fn what_the_fork_wiped_tells_nothing() {
        // At 20 is what is wiped, with all of it in memory; what moves over it is all out.
        let history = [unmap(20, 30, &[(20, 30)]), remap(0, 20, false, &[])];
        let own = Own {
            registered: regions(&[(0, 10), (20, 30)]),
            usable: regions(&[(0, 10), (20, 30)]),
            wiped: regions(&[(20, 30)]),
            present: RangeSet::default(),
        };
        let before_both = mapped(&[(0, 10), (20, 30)], &[(20, 30)]);
        assert_eq!(seen(&history, 0, &before_both, &own), [false; 2]);
    }
}
