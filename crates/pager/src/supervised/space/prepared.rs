//! The part of an address space that prepared forks need (`fork/prepared.rs`). Data only.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::util::pace::Pace;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Changes of mappings that are noted for the governor. More take memory; fewer have it withhold all of a program's
/// memory again if that changes its mappings fast.
const MOST_WATCHED: usize = 4096;

/// Ranges in doubt that are told apart. Of more, those nearest to each other become one: what the program keeps from
/// children itself in between may then be given to them.
const MOST_DOUBTFUL: usize = 4096;

/// Where memory may be kept from children that was mapped in place of what was to be withheld.
#[derive(Default)]
pub(crate) struct Doubtful {
    ranges: RangeSet,
    /// What the helper is asked to withhold just now: a fork may begin before it is known what it met.
    pub asked: Option<PageRange>,
    /// What was given to children, where managed memory may have been moved just then: it is to be withheld again.
    pub given: RangeSet,
}

impl Doubtful {
    pub(crate) fn add(&mut self, range: PageRange) {
        self.ranges.add(range);
        if self.ranges.ranges().len() > MOST_DOUBTFUL {
            let gaps = self.ranges.ranges().windows(2);
            let gaps = gaps.map(|pair| PageRange {
                start: pair[0].end,
                end: pair[1].start,
            });
            if let Some(least) = gaps.min_by_key(|gap| gap.pages()) {
                self.ranges.add(least);
            }
        }
    }

    pub(crate) fn remove(&mut self, range: PageRange) {
        self.ranges.remove(range);
    }

    /// All of them.
    pub(crate) fn ranges(&self) -> RangeSet {
        if Bug::KeptByMistake.is_back() || Bug::WithheldUnmarked.is_back() {
            return RangeSet::default();
        }
        let mut all = self.ranges.clone();
        self.asked.into_iter().for_each(|range| all.add(range));
        all
    }
}

/// Unused where the kernel reports forks.
#[derive(Default)]
pub(crate) struct Prepared {
    /// What the helper was asked to withhold from children, and where it moved since. Every VMA that is withheld
    /// intersects it.
    pub withheld: Mutex<RangeSet>,
    /// What the helper has marked, whether it is managed or not: children show it. Changes by events, in the exclusive
    /// gate, and where the helper answers.
    pub marked: Mutex<RangeSet>,
    /// What was moved while a thread forked, and may not be withheld where it is now.
    pub moved: Mutex<RangeSet>,
    /// What may be kept from children by mistake. Forks and the governor look.
    pub doubtful: Mutex<Doubtful>,
    /// VMAs were listed for a forking thread, which gives and withholds them by their addresses, and not all changes of
    /// mappings beside that are known to be applied. Changes inside the gate. Relaxed.
    pub beside_fork: AtomicBool,
    /// Memory may be marked that is not registered, and moves without an event: another mapping took the place of one
    /// that was to be withheld. Forks look for it. Relaxed: set and read by threads that take the gate in between.
    pub astray: AtomicBool,
    /// Changes of mappings that were applied: what was withheld before one may be elsewhere after it. Changes under the
    /// exclusive gate.
    pub changes: AtomicU32,
    /// Where these changes were, each with their number after it, while the governor withholds memory.
    pub watched: Mutex<Option<Vec<(u32, PageRange)>>>,
    /// When the governor looks for what is kept from children by mistake.
    pub looks: Mutex<Option<Pace>>,
    /// The program has seccomp filters of its own, and is to be managed no more. Its forking thread waits for that.
    pub releases: AtomicBool,
    /// It is managed no more.
    pub released: AtomicBool,
    /// Forks in a row that kept the gate for long. Relaxed: only counted.
    pub expired: AtomicU32,
}

impl Prepared {
    /// From here on it is noted where mappings change. Returns how many have changed before.
    pub(crate) fn watch(&self) -> u32 {
        *lock(&self.watched) = Some(Vec::new());
        self.changes.load(Ordering::Relaxed)
    }

    /// From here on it is not noted any more.
    pub(crate) fn unwatch(&self) {
        *lock(&self.watched) = None;
    }

    /// Where mappings have changed since `changes` of them, as of [`Prepared::watch`]; `None` if that is not known.
    pub(crate) fn changed_since(&self, changes: u32) -> Option<RangeSet> {
        if self.changes.load(Ordering::Relaxed) == changes {
            return Some(RangeSet::default());
        }
        let watched = lock(&self.watched);
        let since = watched.as_ref()?.iter();
        let since = since.filter(|(number, _)| *number > changes);
        Some(since.map(|(_, range)| *range).collect())
    }

    /// Leaves of `ranges` those that are withheld still, where they were withheld after `changes` of mappings, as of
    /// [`Prepared::watch`]. The gate is held exclusively. Returns whether that is all of them.
    pub(crate) fn retain_withheld(&self, ranges: &mut Vec<PageRange>, changes: u32) -> bool {
        let before = ranges.len();
        ranges.retain(|range| self.is_still_withheld(*range, changes));
        self.unwatch();
        ranges.len() == before
    }

    /// Whether what was withheld in a range at `changes` is where it was: else something else may be mapped there. What
    /// changed is noted here before it is in `marked`.
    pub(crate) fn is_still_withheld(&self, range: PageRange, changes: u32) -> bool {
        if Bug::ManagedUnwithheld.is_back() || self.changes.load(Ordering::Relaxed) == changes {
            return true;
        }
        let watched = lock(&self.watched);
        watched.as_ref().is_some_and(|watched| {
            let mut since = watched.iter().filter(|(number, _)| *number > changes);
            since.all(|(_, changed)| changed.intersection(range).is_empty())
        })
    }

    /// Several mappings changed beside each other. What is not managed as yet says nothing of their order, so something that is
    /// withheld may be elsewhere.
    pub(crate) fn note_concurrent(&self) {
        if !lock(&self.withheld).ranges().is_empty() {
            self.astray.store(true, Ordering::Relaxed);
        }
    }

    fn note_change(&self, range: PageRange) {
        let mut watched = lock(&self.watched);
        if watched
            .as_ref()
            .is_some_and(|watched| watched.len() >= MOST_WATCHED)
        {
            // The governor has been held up, and takes all to have changed.
            *watched = None;
        }
        if let Some(watched) = &mut *watched {
            watched.push((self.changes.load(Ordering::Relaxed), range));
        }
    }

    /// The helper has marked what was in a range at `changes`. If mappings changed since, it may be elsewhere, and is
    /// marked again.
    pub(crate) fn note_marked(&self, range: PageRange, changes: u32) {
        // Changes are counted before they are noted here.
        let mut marked = lock(&self.marked);
        if self.is_still_withheld(range, changes) {
            marked.add(range);
        }
    }

    /// Memory was unmapped.
    pub(crate) fn note_unmap(&self, range: PageRange) {
        self.note_change(range);
        lock(&self.marked).remove(range);
        // The program may map there what it keeps from children itself.
        lock(&self.withheld).remove(range);
        lock(&self.moved).remove(range);
        if self.beside_fork.load(Ordering::Relaxed) {
            lock(&self.doubtful).add(range);
        }
    }

    /// Memory was moved, and is withheld where it is now. The program may map what it keeps from children itself where it
    /// was. (What moved in another order than was guessed is found by its mark: [`Prepared::note_concurrent`].)
    pub(crate) fn note_move(&self, from: PageRange, to: VirtualPage, stays: bool) {
        let target = from.moved(from.start, to);
        let beside_fork = self.beside_fork.load(Ordering::Relaxed);
        if beside_fork {
            let mut doubtful = lock(&self.doubtful);
            doubtful.add(from);
            doubtful.add(target);
        }
        self.note_change(from);
        self.note_change(target);
        let mut marked = lock(&self.marked);
        let parts = marked.covered(from);
        marked.remove(target);
        if !stays {
            marked.remove(from);
        }
        for part in parts {
            marked.add(part.moved(from.start, to));
        }
        drop(marked);
        let mut withheld = lock(&self.withheld);
        let parts = withheld.covered(from);
        withheld.remove(target);
        if !stays {
            withheld.remove(from);
        }
        for part in parts {
            let part = part.moved(from.start, to);
            withheld.add(part);
            if beside_fork {
                lock(&self.moved).add(part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    fn withheld(prepared: &Prepared, ranges: &[PageRange]) {
        for range in ranges {
            lock(&prepared.withheld).add(*range);
            prepared.note_marked(*range, 0);
        }
    }

    #[test]
    fn what_is_mapped_where_memory_was_moved_away_is_not_withheld() {
        let prepared = Prepared::default();
        withheld(&prepared, &[range(10, 20), range(40, 50)]);
        // The second part of the target was something else.
        prepared.note_move(range(12, 18), VirtualPage(44), false);
        for known in [&prepared.withheld, &prepared.marked] {
            let expected = [range(10, 12), range(18, 20), range(40, 50)];
            assert_eq!(lock(known).ranges(), expected);
        }
        prepared.note_move(range(30, 34), VirtualPage(46), false);
        let expected = [range(10, 12), range(18, 20), range(40, 46)];
        assert_eq!(lock(&prepared.withheld).ranges(), expected);
        prepared.note_move(range(10, 12), VirtualPage(60), true);
        let expected = [range(10, 12), range(18, 20), range(40, 46), range(60, 62)];
        assert_eq!(lock(&prepared.withheld).ranges(), expected);
    }

    #[test]
    fn a_program_that_moves_memory_again_and_again_takes_no_more_of_memfolds() {
        let prepared = Prepared::default();
        withheld(&prepared, &[range(0, 1)]);
        for place in 0..100_000 {
            let from = range(2 * place, 2 * place + 1);
            prepared.note_move(from, VirtualPage(2 * place + 2), false);
        }
        let withheld = lock(&prepared.withheld);
        assert_eq!(withheld.ranges().len(), 1);
        assert_eq!(withheld.ranges()[0], range(200_000, 200_001));
    }
}
