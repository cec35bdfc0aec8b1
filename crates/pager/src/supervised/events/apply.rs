//! What the program does to its mappings, applied to the page states.
//!
//! All of this runs while the gate is held exclusively, from the reading of the message on: no
//! page is copied in or moved out meanwhile, and a batch that is planned but not executed finds
//! its event count stale.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, Removal};
use crate::supervised::reclaim::batch::Batch;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::{Slot, SlotRanges};
use std::sync::atomic::Ordering;

impl AddressSpace {
    /// To be called once before the events of one read are applied.
    pub fn begin_events(&self, gate: &Exclusive<'_>) {
        // A batch that was executed before the event is staged by now; one that was not will not
        // be any more.
        Batch::settle(self, gate);
        self.channel.bump_event_count();
    }

    /// `munmap`, a mapping over it, a shrinking heap: nothing of the range is left.
    pub fn apply_unmap(&self, gate: &Exclusive<'_>, range: PageRange) {
        lock(&self.managed).remove(range);
        self.forget(gate, range, PageState::Hole);
    }

    /// `madvise` drops the range's pages: they read as zero from now on. It does so after this event
    /// was read, so zeros must not be brought in ahead of another thread until then: they would count
    /// as resident and be dropped. Holes ahead are filled up to the first page that is none.
    pub fn apply_remove(&self, gate: &Exclusive<'_>, range: PageRange) {
        let count = self.removed.count.fetch_add(1, Ordering::Relaxed);
        let removal = Removal::new(self.resources.seconds(), count);
        let removed = PageState::Removed(removal);
        self.forget(gate, range, removed);
        gate.table()
            .entry(range.start)
            .replace(PageState::Hole, removed);
        let unmanaged = lock(&self.managed).uncovered(range);
        lock(&self.removed.unmanaged).note(&unmanaged, removal);
    }

    /// Gives up what is kept of a range; every page but holes becomes `after`.
    fn forget(&self, gate: &Exclusive<'_>, range: PageRange, after: PageState) {
        let mut slots = SlotRanges::new();
        let mut stage = lock(&self.stage);
        gate.table().visit(range, |_, entry| {
            match entry.load() {
                PageState::Hole => return true,
                // The fault that claimed a page finds its claim gone and releases the slot.
                PageState::Resident { .. }
                | PageState::Moving(_)
                | PageState::Removed(_)
                | PageState::Filling(..) => {}
                PageState::Staged(place) | PageState::Returning(place) => stage.retire(place),
                PageState::Swapped(slot) => slots.push(slot),
                PageState::Clearing => unreachable!("pages are cleared inside the gate"),
            }
            entry.set(after);
            true
        });
        drop(stage);
        self.resources.release(slots);
    }

    /// `mremap` moved a range: its pages have other addresses now. Where the mapping `stays` behind, it is
    /// registered and empty, and as managed as before.
    pub fn apply_remap(&self, gate: &Exclusive<'_>, from: PageRange, to: VirtualPage, stays: bool) {
        let target = from.moved(from.start, to);
        self.forget(gate, target, PageState::Hole);
        let mut moved = Vec::new();
        gate.table().visit(from, |page, entry| {
            let state = entry.take(PageState::Hole);
            if state != PageState::Hole {
                moved.push((to.plus(page.0 - from.start.0), state));
            }
            true
        });
        let mut stage = lock(&self.stage);
        for (page, state) in moved {
            let state = match state {
                PageState::Staged(place) | PageState::Returning(place) => {
                    stage.rename(place, page);
                    PageState::Staged(place)
                }
                // Planned, and stale since this event: it stays in the program.
                PageState::Moving(_) => PageState::RESIDENT,
                // The claim is void; the fault releases its own count of the slot.
                PageState::Filling(slot, _) => {
                    self.must_duplicate(slot);
                    PageState::Swapped(slot)
                }
                other => other,
            };
            gate.table().entry(page).set(state);
        }
        drop(stage);
        let mut regions = lock(&self.managed);
        // The rest may be registered, too, but what is in memory there was not looked for.
        let managed = regions.covered(from);
        if !stays {
            regions.remove(from);
        }
        for part in managed {
            regions.add(part.moved(from.start, to));
        }
        // A mapping that grew while it moved is larger than the event says.
        self.sampling.rescan.store(true, Ordering::Relaxed);
    }

    /// A range that was wiped by the fork: nothing of it was inherited, but it is managed.
    pub fn apply_wipe(&self, gate: &Exclusive<'_>, range: PageRange) {
        self.forget(gate, range, PageState::Hole);
    }

    /// Adds an owner to a slot that has one.
    pub fn must_duplicate(&self, slot: Slot) {
        self.resources
            .swap
            .duplicate(slot)
            .expect("a live slot can have another owner");
    }
}
