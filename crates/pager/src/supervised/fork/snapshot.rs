//! Which of its parent's mapping changes a forked child contains.
//!
//! The kernel serializes changes and forks, but the events of several threads may be read in another
//! order. Changes of disjoint ranges may even be read on both sides of a fork although the child
//! contains both, or neither. The order of changes with overlapping ranges is known
//! (`events/reorder.rs`), and the child contains a prefix of them. So for each group of such changes,
//! the mappings after every prefix are compared with those of the child.
//!
//! Residency is the strongest evidence: an untracked page adds the same error to every candidate, so it
//! cancels out. Next are the readable and writable mappings, because a range that was unmapped may
//! still be registered, or registered again.
//!
//! Of two prefixes that differ from the child by as much, it contains either only if both leave the same
//! memory in the same places, or if none of it is paged out. Else nothing tells (if no page is resident, a
//! move onto another mapping, where both may be mapped afterwards, `MREMAP_DONTUNMAP`), and nothing is guessed.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;

/// The parent's mappings before all changes, as far as they are known.
#[derive(Clone, Default)]
pub(crate) struct ParentMappings {
    /// Registered ranges.
    pub registered: RangeSet,
    /// Resident pages of all ranges that changes affect.
    pub resident: RangeSet,
}

/// The child's mappings.
#[derive(Clone, Default)]
pub(crate) struct ChildMappings {
    /// Registered ranges.
    pub registered: RangeSet,
    /// Registered ranges that are readable and writable.
    pub usable: RangeSet,
    /// Registered ranges with `MADV_WIPEONFORK`.
    pub wiped: RangeSet,
    /// Resident pages of registered ranges that changes affect.
    pub resident: RangeSet,
}

/// The ranges that a change affects.
pub(crate) fn ranges(change: Change) -> Vec<PageRange> {
    match change {
        Change::Unmap(range) | Change::Remove(range) => vec![range],
        Change::Remap { from, to, .. } => vec![from, from.moved(from.start, to)],
        Change::Fork(_) => Vec::new(),
    }
}

/// Whether the child contains each change of a history, of which the first `forked_at` were read before the fork.
/// `None` if its mappings do not tell, and it matters where memory moved, which `matters` says of a set of ranges.
pub(crate) fn contained(
    history: &[Change],
    forked_at: usize,
    parent: &ParentMappings,
    child: &ChildMappings,
    matters: impl Fn(&RangeSet) -> bool,
) -> Option<Vec<bool>> {
    let mut contained = vec![false; history.len()];
    if Bug::ForkTakenByReadOrder.is_back() {
        contained[..forked_at].fill(true);
        return Some(contained);
    }
    for (footprint, members) in groups(history) {
        let changes = members.iter().map(|index| history[*index]);
        let layouts = layouts(&within(&footprint, &parent.registered), changes);
        let child = ChildMappings {
            registered: within(&footprint, &child.registered),
            usable: within(&footprint, &child.usable),
            wiped: within(&footprint, &child.wiped),
            resident: within(&footprint, &child.resident),
        };
        let differences = layouts.iter();
        let differences = differences.map(|layout| layout.difference(&parent.resident, &child));
        let differences: Vec<Difference> = differences.collect();
        let least = differences.iter().min()?;
        let best = (0..layouts.len()).filter(|count| differences[*count] == *least);
        // Pages that were dropped leave the mappings as they are: the last is the one to take.
        let last = best.clone().next_back()?;
        let mut best = best.map(|count| &layouts[count].pieces);
        if !best.all(|pieces| *pieces == layouts[last].pieces) && matters(&footprint) {
            return None;
        }
        for index in &members[..last] {
            contained[*index] = true;
        }
    }
    Some(contained)
}

/// Groups of changes with overlapping ranges: the union of the ranges, and the indices in the history.
fn groups(history: &[Change]) -> Vec<(RangeSet, Vec<usize>)> {
    let mut groups: Vec<(RangeSet, Vec<usize>)> = Vec::new();
    for (index, change) in history.iter().enumerate() {
        let (mut footprint, mut members) = (RangeSet::default(), vec![index]);
        let ranges = ranges(*change);
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

/// Number of pages in which the child differs from a candidate. Compared in the order of the fields.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Difference {
    resident: u64,
    usable: u64,
    registered: u64,
}

/// The parent's registered memory after some changes.
#[derive(Clone, Default)]
struct Layout {
    /// Ranges in order, each with where it was before all changes; `None`: it is empty, or was not registered there.
    pieces: Vec<(PageRange, Option<VirtualPage>)>,
    /// Sources of moves. They may still be mapped, empty, even if an echo was read: it may be of an unmapping right after
    /// a move that left its mapping.
    left: RangeSet,
}

/// The layouts after each number of changes, 0 to all.
fn layouts(registered: &RangeSet, changes: impl Iterator<Item = Change>) -> Vec<Layout> {
    let ranges = registered.ranges().iter();
    let mut layout = Layout {
        pieces: ranges.map(|range| (*range, Some(range.start))).collect(),
        left: RangeSet::default(),
    };
    let mut layouts = vec![layout.clone()];
    for change in changes {
        layout.apply(change);
        layouts.push(layout.clone());
    }
    layouts
}

impl Layout {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Unmap(range) => drop(self.cut(range)),
            Change::Remap { from, to, stays } => {
                let target = from.moved(from.start, to);
                let moved = self.cut(from);
                self.cut(target);
                let known = moved.iter().map(|(piece, _)| *piece);
                let unknown = known.collect::<RangeSet>().uncovered(from).into_iter();
                let moved = moved
                    .into_iter()
                    .chain(unknown.map(|piece| (piece, None)))
                    .map(|(piece, was)| (piece.moved(from.start, to), was));
                self.pieces.extend(moved);
                if stays {
                    self.pieces.push((from, None));
                }
                self.left.remove(target);
                self.left.add(from);
            }
            Change::Remove(_) | Change::Fork(_) => {}
        }
        self.tidy();
    }

    /// Takes out what lies in a range.
    fn cut(&mut self, range: PageRange) -> Vec<(PageRange, Option<VirtualPage>)> {
        let mut taken = Vec::new();
        for (piece, was) in std::mem::take(&mut self.pieces) {
            let part = |part: PageRange| {
                let offset = part.start.0 - piece.start.0;
                (part, was.map(|was| was.plus(offset)))
            };
            let inside = piece.intersection(range);
            if inside.is_empty() {
                self.pieces.push((piece, was));
                continue;
            }
            taken.push(part(inside));
            let outside = std::iter::once(range)
                .collect::<RangeSet>()
                .uncovered(piece);
            self.pieces.extend(outside.into_iter().map(part));
        }
        taken
    }

    /// Sorts the pieces, and joins those that were one.
    fn tidy(&mut self) {
        self.pieces.sort_unstable_by_key(|(piece, _)| piece.start);
        self.pieces.dedup_by(|(next, next_was), (piece, was)| {
            let follows = was.map(|was| was.plus(piece.pages())) == *next_was;
            let joins = piece.end == next.start && follows;
            if joins {
                piece.end = next.end;
            }
            joins
        });
    }

    /// The difference from a child, where `resident` was resident before all changes.
    fn difference(&self, resident: &RangeSet, child: &ChildMappings) -> Difference {
        let pieces = self.pieces.iter();
        let registered: RangeSet = pieces.map(|(piece, _)| *piece).collect();
        let resident = self.moved(resident);
        let of = |child: &RangeSet| {
            let unexpected = outside(child, &registered);
            outside(&unexpected, &self.left).pages() + outside(&registered, child).pages()
        };
        let missing = outside(&resident, &child.resident);
        Difference {
            resident: outside(&child.resident, &resident).pages()
                + outside(&missing, &child.wiped).pages(),
            usable: of(&child.usable),
            registered: of(&child.registered),
        }
    }

    /// Where pages of before all changes are.
    fn moved(&self, pages: &RangeSet) -> RangeSet {
        let pieces = self.pieces.iter();
        let pieces = pieces.filter_map(|(piece, was)| Some((*piece, (*was)?)));
        pieces
            .flat_map(|(piece, was)| {
                let parts = pages.covered(piece.moved(piece.start, was));
                parts
                    .into_iter()
                    .map(move |part| part.moved(was, piece.start))
            })
            .collect()
    }
}

/// The intersection of both sets.
fn within(footprint: &RangeSet, regions: &RangeSet) -> RangeSet {
    let parts = footprint.ranges().iter();
    parts.flat_map(|range| regions.covered(*range)).collect()
}

/// The pages of `regions` that are not in `others`.
fn outside(regions: &RangeSet, others: &RangeSet) -> RangeSet {
    let parts = regions.ranges().iter();
    parts.flat_map(|range| others.uncovered(*range)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    fn regions(ranges: &[(u64, u64)]) -> RangeSet {
        ranges
            .iter()
            .map(|(start, end)| range(*start, *end))
            .collect()
    }

    fn unmap(start: u64, end: u64) -> Change {
        Change::Unmap(range(start, end))
    }

    /// A move of ten pages.
    fn remap(from: u64, to: u64, stays: bool) -> Change {
        Change::Remap {
            from: range(from, from + 10),
            to: VirtualPage(to),
            stays,
        }
    }

    /// Registered and resident ranges.
    type Known<'a> = (&'a [(u64, u64)], &'a [(u64, u64)]);

    /// Calls `contained` for a child whose mappings are all readable and writable, where all memory matters.
    fn saw(history: &[Change], parent: Known<'_>, child: Known<'_>) -> Option<Vec<bool>> {
        let parent = ParentMappings {
            registered: regions(parent.0),
            resident: regions(parent.1),
        };
        let child = ChildMappings {
            usable: regions(child.0),
            registered: regions(child.0),
            wiped: RangeSet::default(),
            resident: regions(child.1),
        };
        contained(history, 0, &parent, &child, |_| true)
    }

    #[test]
    fn changes_far_apart_are_seen_or_not_each() {
        let history = [unmap(0, 10), unmap(50, 60), unmap(100, 110)];
        let all = [(0, 10), (50, 60), (100, 110)];
        let contained = |child: &[(u64, u64)]| saw(&history, (&all, &[]), (child, &[]));
        assert_eq!(
            contained(&[(0, 10), (100, 110)]),
            Some(vec![false, true, false])
        );
        assert_eq!(contained(&all[1..]), Some(vec![true, false, false]));
        assert_eq!(contained(&[]), Some(vec![true; 3]));
    }

    #[test]
    fn memory_that_moved_on_before_is_not_where_it_moved_from() {
        // a: 0 to 20, to 40; and b: 60 to 0.
        let history = [
            remap(0, 20, false),
            remap(20, 40, false),
            remap(60, 0, false),
        ];
        let parent: Known<'_> = (&[(0, 10), (60, 70)], &[]);
        for (child, count) in [(0, 0), (20, 1), (40, 2)] {
            let child = [(child, child + 10), (60, 70)];
            let mut expected = vec![true; 3];
            expected[count..].fill(false);
            assert_eq!(saw(&history, parent, (&child, &[])), Some(expected));
        }
        let child: Known<'_> = (&[(40, 50), (0, 10)], &[]);
        assert_eq!(saw(&history, parent, child), Some(vec![true; 3]));
    }

    #[test]
    fn a_mapping_that_moved_away_may_have_stayed() {
        // Moved over another and back, then unmapped. The child is of the middle, or of the end.
        let history = [
            unmap(20, 30),
            remap(0, 20, false),
            remap(20, 0, false),
            unmap(0, 10),
        ];
        let both = [(0, 10), (20, 30)];
        assert_eq!(saw(&history, (&both, &[]), (&[(20, 30)], &[])), None);
        let contained = saw(&history, (&both, &[(3, 4)]), (&[(20, 30)], &[(23, 24)]));
        assert_eq!(contained, Some(vec![true, true, false, false]));
        let contained = saw(&history, (&both, &[(3, 4)]), (&[(20, 30)], &[]));
        assert_eq!(contained, Some(vec![true; 4]));
    }

    #[test]
    fn what_was_in_memory_tells_whether_it_moved_to_where_another_was() {
        // The target mapping has page 20 resident; the source has page 3 or none.
        let history = [unmap(20, 30), remap(0, 20, true)];
        let both = [(0, 10), (20, 30)];
        let before: Known<'_> = (&both, &[(3, 4), (20, 21)]);
        let after: Known<'_> = (&both, &[(23, 24)]);
        assert_eq!(saw(&history, before, before), Some(vec![false; 2]));
        assert_eq!(saw(&history, before, after), Some(vec![true; 2]));
        let before: Known<'_> = (&both, &[(20, 21)]);
        assert_eq!(saw(&history, before, before), Some(vec![false; 2]));
        assert_eq!(saw(&history, before, (&both, &[])), Some(vec![true; 2]));
    }

    #[test]
    fn where_nothing_tells_nothing_is_guessed() {
        // Over another mapping, and both stay.
        let history = [unmap(20, 30), remap(0, 20, true)];
        let both = regions(&[(0, 10), (20, 30)]);
        let parent = ParentMappings {
            registered: both.clone(),
            resident: RangeSet::default(),
        };
        let child = ChildMappings {
            usable: both.clone(),
            registered: both,
            ..ChildMappings::default()
        };
        let contained = |matters| contained(&history, 2, &parent, &child, |_| matters);
        assert_eq!(contained(true), None);
        assert!(contained(false).is_some());
    }

    #[test]
    fn what_is_back_where_it_was_may_have_moved_or_not() {
        let history = [remap(0, 20, false), remap(20, 0, false)];
        let contained = saw(&history, (&[(0, 10)], &[]), (&[(0, 10)], &[]));
        assert_eq!(contained, Some(vec![true; 2]));
    }

    #[test]
    fn what_was_dropped_before_the_fork_is_seen_where_it_was() {
        let dropped = Change::Remove(range(22, 24));
        let history = [remap(0, 20, false), dropped, remap(20, 40, false)];
        for (child, seen) in [(0, [false; 3]), (20, [true, true, false]), (40, [true; 3])] {
            let contained = saw(&history, (&[(0, 10)], &[]), (&[(child, child + 10)], &[]));
            assert_eq!(contained, Some(seen.to_vec()), "at {child}");
        }
    }

    #[test]
    fn an_end_that_was_taken_for_an_echo_is_seen_or_not() {
        // The mapping stays behind and is unmapped right after; the fork came in between.
        let history = [remap(0, 20, false)];
        let parent: Known<'_> = (&[(0, 10)], &[(0, 10)]);
        let child: Known<'_> = (&[(0, 10), (20, 30)], &[(20, 30)]);
        assert_eq!(saw(&history, parent, child), Some(vec![true]));
    }

    #[test]
    fn what_cannot_be_used_any_more_is_not_what_moved() {
        // The target is registered although not usable: something else was mapped there.
        for resident in [&[(0, 10)][..], &[]] {
            let history = [remap(0, 20, false)];
            let parent = ParentMappings {
                registered: regions(&[(0, 10)]),
                resident: regions(resident),
            };
            let child = ChildMappings {
                registered: regions(&[(0, 10), (20, 30)]),
                usable: regions(&[(0, 10)]),
                resident: regions(resident),
                wiped: RangeSet::default(),
            };
            let contained = contained(&history, 1, &parent, &child, |_| true);
            assert_eq!(contained, Some(vec![false]));
        }
    }

    #[test]
    fn what_the_fork_wiped_tells_nothing() {
        // The range at 20 is wiped on fork and resident in the parent; what moves over it is paged out.
        let history = [unmap(20, 30), remap(0, 20, false)];
        let both = regions(&[(0, 10), (20, 30)]);
        let parent = ParentMappings {
            registered: both.clone(),
            resident: regions(&[(20, 30)]),
        };
        let child = ChildMappings {
            usable: both.clone(),
            registered: both,
            wiped: regions(&[(20, 30)]),
            resident: RangeSet::default(),
        };
        let contained = contained(&history, 0, &parent, &child, |_| true);
        assert_eq!(contained, None);
    }

    #[test]
    fn a_part_that_moves_is_told_from_the_rest() {
        let mut layouts = layouts(
            &regions(&[(0, 30)]),
            [remap(10, 50, false), remap(50, 10, false)].into_iter(),
        );
        let back = layouts.pop().expect("the last");
        let away = layouts.pop().expect("the second");
        let pieces = |layout: &Layout| {
            let pieces = layout.pieces.iter();
            let numbers = pieces.map(|(at, was)| (at.start.0, at.end.0, was.map(|was| was.0)));
            numbers.collect::<Vec<_>>()
        };
        assert_eq!(
            pieces(&away),
            [(0, 10, Some(0)), (20, 30, Some(20)), (50, 60, Some(10))]
        );
        assert_eq!(pieces(&back), [(0, 30, Some(0))]);
    }
}
