//! Applying events to the page states.
//!
//! The gate is held exclusively from reading the messages until all events are applied. So no page is
//! copied in or moved out meanwhile, and the helper finds the event count of a planned batch stale.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, Removal};
use crate::supervised::reclaim::batch::{Batch, Overrun};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::{Slot, SlotRanges};
use std::sync::atomic::Ordering;

impl AddressSpace {
    /// Prepares for applying the events of one read.
    pub(crate) fn begin_events(&self, gate: &Exclusive<'_>) {
        debug_assert!(gate.is_of(self));
        // A batch executed before the event is settled; one not executed yet becomes stale.
        if !Bug::SettledTooLate.is_back() {
            Batch::settle(self, gate);
        }
        if !Bug::StaleBatchExecuted.is_back() {
            self.channel.bump_event_count();
        }
    }

    /// Applies munmap, a mapping over the range, or a shrinking heap.
    pub(crate) fn apply_unmap(&self, gate: &Exclusive<'_>, range: PageRange) {
        lock(&self.managed).remove(range);
        self.cow.note_unmapped(range);
        self.forget(gate, range, PageState::Hole);
    }

    /// Applies a `madvise` that drops pages, which read as zeros afterwards.
    ///
    /// The kernel drops them after this event was read. Zeros filled in before, by readahead for
    /// another thread, would count as resident and be dropped. So the first page becomes `Removed` even
    /// if it was a hole: a readahead window ends at the first page that is not a hole.
    pub(crate) fn apply_remove(&self, gate: &Exclusive<'_>, range: PageRange) {
        let count = self.removed.count.fetch_add(1, Ordering::Release);
        let removal = Removal::new(self.resources.seconds(), count);
        let removed = PageState::Removed(removal);
        self.forget(gate, range, removed);
        if Bug::ZerosBesideMadvise.is_back() {
            return;
        }
        gate.table()
            .entry(range.start)
            .replace(PageState::Hole, removed);
        let unmanaged = lock(&self.managed).uncovered(range);
        lock(&self.removed.unmanaged).note(&unmanaged, removal);
    }

    /// Releases the slots and places of a range. Every page that is not a hole becomes `after`.
    fn forget(&self, gate: &Exclusive<'_>, range: PageRange, after: PageState) {
        debug_assert!(gate.is_of(self));
        let (mut slots, mut overrun) = (SlotRanges::new(), Overrun::default());
        let carries = self.resources.carries();
        let mut stage = lock(&self.stage);
        gate.table().visit(range, |_, entry| {
            let is_dropped = matches!(after, PageState::Removed(_));
            let mut after = after;
            match entry.load() {
                PageState::Hole => return true,
                PageState::Resident { .. } if is_dropped && Bug::DroppedPagesMovedOut.is_back() => {
                    return true;
                }
                PageState::Staged(place) if is_dropped && Bug::ZerosBesideMadvise.is_back() => {
                    stage.retire(place);
                    after = PageState::Hole;
                }
                PageState::Swapped(slot, _) if is_dropped && Bug::ZerosBesideMadvise.is_back() => {
                    slots.push(slot);
                    after = PageState::Hole;
                }
                // A fault that claimed the page finds the claim gone and releases the slot.
                PageState::Resident { .. }
                | PageState::Moving(_)
                | PageState::Removed(_)
                | PageState::Filling(..) => {}
                PageState::Staged(place) | PageState::Returning(place) => {
                    stage.retire(place);
                    if carries && !is_dropped {
                        let stage_page = self.stage_page(place);
                        overrun.unmapped.add(PageRange::around(stage_page, 1));
                    }
                }
                PageState::Swapped(slot, _) => slots.push(slot),
                PageState::Clearing => unreachable!("pages are cleared inside the gate"),
            }
            entry.set(after);
            true
        });
        drop(stage);
        self.note_overrun(&overrun);
        self.resources.release(slots);
    }

    /// Applies an mremap. If the mapping `stays` behind (`MREMAP_DONTUNMAP`), it is empty, registered,
    /// and as managed as before.
    pub(crate) fn apply_remap(
        &self,
        gate: &Exclusive<'_>,
        from: PageRange,
        to: VirtualPage,
        stays: bool,
    ) {
        let target = from.moved(from.start, to);
        self.forget(gate, target, PageState::Hole);
        self.cow.note_moved(from, to);
        self.fork.sharing.note_moved();
        let mut moved = Vec::new();
        gate.table().visit(from, |page, entry| {
            let state = entry.take(PageState::Hole);
            if state != PageState::Hole {
                moved.push((to.plus(page.0 - from.start.0), state));
            }
            true
        });
        let mut overrun = Overrun::default();
        let mut stage = lock(&self.stage);
        for (page, state) in moved {
            let state = match state {
                PageState::Staged(place) | PageState::Returning(place) => {
                    stage.rename(place, page);
                    PageState::Staged(place)
                }
                // The batch is stale since this event, so the page stays in the program.
                PageState::Moving(_) => PageState::RESIDENT,
                // The claim is void; the fault releases its own reference of the slot.
                PageState::Filling(slot, _) => {
                    self.must_duplicate(slot);
                    PageState::Swapped(slot, self.resources.refaults.shadow())
                }
                PageState::Removed(_) => {
                    overrun.removed_moved.add(PageRange::around(page, 1));
                    state
                }
                other => other,
            };
            gate.table().entry(page).set(state);
        }
        drop(stage);
        let mut regions = lock(&self.managed);
        // Other parts may be registered, too, but their resident pages are not known.
        let managed = regions.covered(from);
        if self.resources.carries() {
            for part in regions.uncovered(from) {
                overrun.unmanaged_moved.add(part.moved(from.start, to));
            }
        }
        if !stays {
            regions.remove(from);
        }
        for part in managed {
            regions.add(part.moved(from.start, to));
        }
        drop(regions);
        self.note_overrun(&overrun);
        // A mapping that grew in the move is larger than the range of the event.
        self.sampling.rescan.store(true, Ordering::Relaxed);
    }

    /// Applies `MADV_WIPEONFORK`: no page of the range was inherited, but the range is managed.
    pub(crate) fn apply_wipe(&self, gate: &Exclusive<'_>, range: PageRange) {
        self.forget(gate, range, PageState::Hole);
    }

    /// Takes another reference of a slot that has one.
    pub(crate) fn must_duplicate(&self, slot: Slot) {
        self.resources
            .swap
            .duplicate(slot)
            .expect("a slot in use can take another reference");
    }
}
