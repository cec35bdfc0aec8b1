//! How many pages of one program may be shared, and how many of those may stop being so unseen.
//!
//! Between two counts the group's estimate is lowered by all that may have ended the sharing of a page: faults of which
//! nothing else is known, pages that left, exits. A program that maps files and shared memory has thousands of such
//! faults and shares a few hundred pages. So what a look at its page table found bounds what is taken off the
//! estimate until it forks again: no more pages can leave than are shared, and no more copies can be made unseen than
//! are not write-protected.
//!
//! Pages become shared only by a fork. So until the next one, looks go where the one before found any; after the program
//! moved pages or its mappings were found to have changed, everywhere. What a look misses shows at the next one everywhere:
//! pages that the kernel merges (KSM), or was just moving or had in its own swap.

use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_sys::process::{SharedFrames, VirtualMemoryArea};
use std::sync::Arc;
use std::time::Duration;

/// How long looks go only where pages were shared. Longer takes less CPU time, and leaves what is moved uncounted for longer.
const PLACES_HOLD: Duration = Duration::from_secs(1);

/// Ranges of addresses `(start, end)`, in order.
pub(crate) type Places = Arc<[(u64, u64)]>;

/// The bounds of one address space. Any thread uses them; they have their own lock, the innermost.
#[derive(Debug, Default)]
pub(crate) struct SharedBounds(Mutex<Bounds>);

#[derive(Debug)]
struct Bounds {
    /// Pages that may be shared.
    pages: u64,
    /// Those of which a write is not seen.
    unprotected: u64,
    /// Number of its forks, moves of pages and changes of its mappings so far.
    changes: u64,
    /// Where its anonymous pages may be, by the last look at its mappings.
    private: Option<Places>,
    /// Where the shared ones are since the last of them, and when that was looked for everywhere.
    shared: Option<(Places, Instant)>,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            pages: u64::MAX,
            unprotected: u64::MAX,
            changes: 0,
            private: None,
            shared: None,
        }
    }
}

impl Bounds {
    /// Shared pages may be anywhere.
    fn note_change(&mut self) {
        self.shared = None;
        self.changes += 1;
    }
}

/// A look at the page table, from before it begins.
#[derive(Debug)]
pub(crate) struct Look {
    changes: u64,
    /// Where shared pages may be, if the mappings were looked at.
    pub places: Option<Places>,
    /// When a look went everywhere, if this one does not.
    everywhere: Option<Instant>,
}

impl SharedBounds {
    /// The program forked, or is a child: all that is in memory is shared, and not protected yet.
    pub(crate) fn note_fork(&self) {
        let mut bounds = lock(&self.0);
        bounds.pages = u64::MAX;
        bounds.unprotected = u64::MAX;
        bounds.note_change();
    }

    /// All but so many pages were protected since the last fork.
    pub(crate) fn note_protected(&self, unprotected: u64) {
        let mut bounds = lock(&self.0);
        bounds.unprotected = bounds.unprotected.min(unprotected);
    }

    /// Nothing is protected any more.
    pub(crate) fn note_unprotected(&self) {
        lock(&self.0).unprotected = u64::MAX;
    }

    /// Takes `pages` that are not in memory any more. Returns how many of them may have been shared.
    pub(crate) fn take_left(&self, pages: u64) -> u64 {
        let mut bounds = lock(&self.0);
        let left = pages.min(bounds.pages);
        bounds.pages -= left;
        left
    }

    /// Takes `faults` that may have copied a page each. Returns how many copies they can have made.
    pub(crate) fn take_copied(&self, faults: u64) -> u64 {
        let mut bounds = lock(&self.0);
        let copied = faults.min(bounds.unprotected).min(bounds.pages);
        bounds.unprotected -= copied;
        bounds.pages -= copied;
        copied
    }

    /// Notes the mappings, in which anonymous pages may be.
    pub(crate) fn note_mappings(&self, areas: &[VirtualMemoryArea]) {
        let mut private: Vec<(u64, u64)> = Vec::new();
        for area in areas.iter().filter(|area| area.may_be_shared()) {
            match private.last_mut() {
                Some((_, end)) if *end == area.start => *end = area.end,
                _ => private.push((area.start, area.end)),
            }
        }
        let private: Places = private.into();
        let mut bounds = lock(&self.0);
        if bounds.private.as_ref() != Some(&private) {
            bounds.note_change();
        }
        // The list of a process that has just ended is empty. A child that inherited that would not be looked at.
        if !private.is_empty() {
            bounds.private = Some(private);
        }
    }

    /// The program moved pages: they may be anywhere.
    pub(crate) fn note_moved(&self) {
        lock(&self.0).note_change();
    }

    /// Has a child's looks go where its parent's do: both have the same mappings.
    pub(crate) fn inherit(&self, parent: &SharedBounds) {
        let private = lock(&parent.0).private.clone();
        lock(&self.0).private = private;
    }

    /// Begins a look at the page table.
    pub(crate) fn begin_look(&self) -> Look {
        let bounds = lock(&self.0);
        let shared = bounds.shared.as_ref();
        let shared = shared.filter(|(_, everywhere)| everywhere.elapsed() < PLACES_HOLD);
        Look {
            changes: bounds.changes,
            places: shared
                .map(|(places, _)| places)
                .or(bounds.private.as_ref())
                .cloned(),
            everywhere: shared.map(|(_, everywhere)| *everywhere),
        }
    }

    /// Ends a look. What it found says nothing if the program has forked, moved pages or changed its mappings since.
    pub(crate) fn end_look(&self, look: &Look, found: &SharedFrames) {
        let everywhere = look.everywhere.unwrap_or_else(Instant::now);
        let mut shared = Some((found.places.as_slice().into(), everywhere));
        let mut bounds = lock(&self.0);
        if bounds.changes == look.changes {
            bounds.pages = found.pages;
            bounds.unprotected = found.unprotected;
            // The list before is freed without the lock, for which the governor waits.
            std::mem::swap(&mut bounds.shared, &mut shared);
        }
        drop(bounds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::process::AreaKind;

    fn found(pages: u64, unprotected: u64) -> SharedFrames {
        SharedFrames {
            pages,
            unprotected,
            ..SharedFrames::default()
        }
    }

    #[test]
    fn looks_go_where_pages_were_shared_until_the_next_fork() {
        let bounds = SharedBounds::default();
        let area = |start, end| VirtualMemoryArea {
            start,
            end,
            kind: AreaKind::Movable,
        };
        bounds.note_mappings(&[area(0x1000, 0x9000)]);
        let private: Places = [(0x1000, 0x9000)].into();
        let shared = SharedFrames {
            places: vec![(0x2000, 0x3000)],
            ..found(1, 0)
        };
        let look = bounds.begin_look();
        assert_eq!(look.places.as_ref(), Some(&private));
        bounds.note_fork();
        bounds.end_look(&look, &shared);
        let look = bounds.begin_look();
        assert_eq!(look.places.as_ref(), Some(&private), "it forked meanwhile");
        bounds.end_look(&look, &shared);
        // (Unless this test stood still for so long.)
        let is_narrow = |places: &[(u64, u64)]| {
            let look = bounds.begin_look();
            let is_over = look.everywhere.is_none() && look.places.as_ref() == Some(&private);
            assert!(is_over || look.places.as_deref() == Some(places));
            !is_over
        };
        is_narrow(&[(0x2000, 0x3000)]);
        bounds.end_look(&bounds.begin_look(), &found(0, 0));
        is_narrow(&[]);
        bounds.note_mappings(&[area(0x1000, 0x9000)]);
        is_narrow(&[]);
        let changes: [&dyn Fn(); 3] = [&|| bounds.note_fork(), &|| bounds.note_moved(), &|| {
            bounds.note_mappings(&[area(0x1000, 0xa000)]);
        }];
        for change in changes {
            bounds.note_mappings(&[area(0x1000, 0x9000)]);
            bounds.end_look(&bounds.begin_look(), &shared);
            let look = bounds.begin_look();
            change();
            assert_eq!(bounds.begin_look().everywhere, None);
            bounds.end_look(&look, &shared);
            assert_eq!(bounds.begin_look().everywhere, None, "from before it");
        }
        bounds.note_mappings(&[area(0x1000, 0x9000)]);
        bounds.note_mappings(&[]);
        assert_eq!(
            bounds.begin_look().places.as_ref(),
            Some(&private),
            "it has ended"
        );
        // A look is everywhere again after a while, however many there were in between.
        bounds.end_look(&bounds.begin_look(), &shared);
        let began = Instant::now();
        while is_narrow(&[(0x2000, 0x3000)]) {
            bounds.end_look(&bounds.begin_look(), &shared);
            assert!(began.elapsed() < 30 * PLACES_HOLD);
            std::thread::sleep(PLACES_HOLD / 50);
        }
        assert!(began.elapsed() >= PLACES_HOLD / 2);
    }

    #[test]
    fn no_more_is_taken_than_was_found() {
        let bounds = SharedBounds::default();
        assert_eq!(bounds.take_left(100), 100, "nothing is known");
        assert_eq!(bounds.take_copied(100), 100);
        let look = bounds.begin_look();
        bounds.end_look(&look, &found(50, 20));
        assert_eq!(bounds.take_copied(15), 15);
        assert_eq!(bounds.take_copied(15), 5);
        assert_eq!(bounds.take_copied(15), 0);
        assert_eq!(bounds.take_left(25), 25);
        assert_eq!(bounds.take_left(25), 5);
        let look = bounds.begin_look();
        bounds.end_look(&look, &found(5, 5));
        assert_eq!(bounds.take_left(3), 3);
        assert_eq!(bounds.take_copied(9), 2, "what left cannot be copied");
    }

    #[test]
    fn a_look_from_before_a_fork_says_nothing() {
        let bounds = SharedBounds::default();
        let look = bounds.begin_look();
        bounds.note_fork();
        bounds.end_look(&look, &found(0, 0));
        assert_eq!(bounds.take_copied(7), 7);
        let look = bounds.begin_look();
        bounds.end_look(&look, &found(0, 0));
        assert_eq!(bounds.take_copied(7), 0);
        bounds.note_fork();
        bounds.note_protected(3);
        assert_eq!(bounds.take_copied(7), 3, "the others are protected");
        bounds.note_unprotected();
        assert_eq!(bounds.take_copied(7), 7);
        assert_eq!(bounds.take_left(7), 7);
    }

    #[test]
    fn a_child_is_looked_at_where_its_parent_is() {
        let (parent, child) = (SharedBounds::default(), SharedBounds::default());
        assert_eq!(child.begin_look().places, None);
        let area = |start, end, kind| VirtualMemoryArea { start, end, kind };
        let areas = [
            area(0x1000, 0x2000, AreaKind::Guard),
            area(0x2000, 0x4000, AreaKind::Movable),
            area(0x4000, 0x5000, AreaKind::Private),
            area(0x5000, 0x9000, AreaKind::Other),
            area(0x9000, 0xa000, AreaKind::Anonymous),
        ];
        parent.note_mappings(&areas);
        let noted: Places = [(0x2000, 0x5000), (0x9000, 0xa000)].into();
        assert_eq!(parent.begin_look().places.as_ref(), Some(&noted));
        child.inherit(&parent);
        assert_eq!(child.begin_look().places, Some(noted));
    }
}
