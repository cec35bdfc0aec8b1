//! Which pages were accessed, where the kernel tells (`UFFDIO_RWPROTECT` in async mode, Linux 7.3).
//!
//! Pages are tracked from the round after they came in on: by then the access that brought them in is over. A victim that was
//! accessed since stays, and is tracked anew: a second chance, as the kernel gives by the accessed bit. What is on the inactive
//! list becomes active so.
//!
//! A page that the kernel does not track counts as accessed once more, and a batch that spares all it meets is followed by
//! one that spares nothing: reclaim goes on, whatever a program does.
//!
//! No page state depends on any of this.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use std::sync::atomic::Ordering;

/// Pages of which is asked at once. More asks for pages that the hand does not reach; fewer takes more system calls.
const ASKED_AT_ONCE: u64 = 512;
/// Ranges that are tracked at once. More hold the gate for longer. Of those that come beyond, pages count as accessed once
/// more; those that were accessed beyond leave.
const MOST_TRACKED: usize = 512;

/// What one batch spares.
#[derive(Default)]
pub(crate) struct Sparing {
    /// Where it was asked which pages were accessed.
    asked: PageRange,
    accessed: RangeSet,
    /// What it has spared. It is not asked for again, as its accesses are tracked anew only then.
    spared: RangeSet,
}

impl Sparing {
    /// Whether a page stays, as it was accessed.
    pub(crate) fn spares(&mut self, space: &AddressSpace, page: VirtualPage) -> bool {
        if self.spared.containing(page).is_some() {
            return true;
        }
        if self.spared.ranges().len() >= MOST_TRACKED {
            return false;
        }
        if !self.asked.contains(page) {
            self.asked = PageRange {
                start: page,
                end: page.plus(ASKED_AT_ONCE),
            };
            let accessed = space
                .inspector()
                .map(|inspector| Process::accessed(&*inspector, self.asked));
            // Where that is not known, none was.
            self.accessed = accessed.and_then(Result::ok).unwrap_or_default();
        }
        let spares = self.accessed.containing(page).is_some();
        if spares {
            self.spared.add(PageRange::around(page, 1));
        }
        spares
    }

    /// Pages that it has spared.
    pub(crate) fn pages(&self) -> u64 {
        self.spared.pages()
    }

    /// Tracks anew what was spared.
    pub(crate) fn track_spared(&self, space: &AddressSpace) {
        // Their accesses were faults that copied nothing (`fork/shared_counter.rs`).
        let counted = &space.sampling.counted_faults;
        counted.fetch_add(self.spared.pages(), Ordering::Relaxed);
        space.track(&self.spared);
    }
}

impl AddressSpace {
    /// Whether the next batch spares what was accessed.
    pub(crate) fn spares_accessed(&self) -> bool {
        self.resources.tracks_accesses() && !self.clock.spared_all.load(Ordering::Relaxed)
    }

    /// Pages came in.
    pub(crate) fn note_arrived(&self, range: PageRange) {
        if !self.resources.tracks_accesses() {
            return;
        }
        let mut arrived = lock(&self.clock.arrived);
        if arrived.ranges().len() < MOST_TRACKED {
            arrived.add(range);
        }
    }

    /// Tracks what came since the last round.
    pub(crate) fn track_arrived(&self) {
        let arrived = std::mem::take(&mut *lock(&self.clock.arrived));
        self.track(&arrived);
    }

    fn track(&self, ranges: &RangeSet) {
        for range in ranges.ranges() {
            // It may be unmapped by now, or registered otherwise.
            let _ = self.uffd().track(*range);
        }
    }
}
