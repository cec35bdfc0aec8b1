//! What the program does to its mappings, applied to the page states.
//!
//! All of this runs while the gate is held exclusively, from the reading of the message on: no
//! page is copied in or moved out meanwhile, and a batch that is planned but not executed finds
//! its event count stale.

use crate::address_space::{AddressSpace, Exclusive};
use crate::group::lock;
use crate::mover::Mover;
use crate::page::{PageRange, VirtualPage};
use crate::regions::Regions;
use crate::stage::StageIndex;
use crate::state::PageState;
use crate::table::PageTable;
use memfold_swap::{Page, Scratch, Slot, SlotRanges};
use memfold_sys::PAGE_SIZE;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl AddressSpace {
    /// To be called once before the events of one read are applied.
    pub fn begin_events(&self, _gate: &Exclusive<'_>) {
        // A batch that was executed before the event is staged by now; one that was not will not
        // be any more.
        self.settle();
        self.channel.bump_event_count();
    }

    /// `munmap`, a mapping over it, a shrinking heap: nothing of the range is left.
    pub fn apply_unmap(&self, gate: &Exclusive<'_>, range: PageRange) {
        lock(&self.regions).remove(range);
        self.forget(gate, range, PageState::Hole);
    }

    /// `madvise` drops the range's pages: they read as zero from now on.
    pub fn apply_remove(&self, gate: &Exclusive<'_>, range: PageRange) {
        self.forget(gate, range, PageState::Removed(self.group().seconds()));
    }

    /// Gives up what is kept of a range; pages that may still be present become `present`.
    fn forget(&self, _gate: &Exclusive<'_>, range: PageRange, present: PageState) {
        let mut slots = SlotRanges::new();
        let mut stage = lock(&self.stage);
        self.table.visit(range, |_, entry| {
            match entry.load() {
                PageState::Hole => {}
                PageState::Resident { .. } | PageState::Moving(_) | PageState::Removed(_) => {
                    entry.set(present);
                }
                PageState::Staged(place) | PageState::Returning(place) => {
                    stage.retire(place);
                    entry.set(PageState::Hole);
                }
                PageState::Swapped(slot) => {
                    slots.push(slot);
                    entry.set(PageState::Hole);
                }
                // The fault that claimed it finds its claim gone and releases the slot.
                PageState::Filling(_) => entry.set(PageState::Hole),
                PageState::Clearing => unreachable!("pages are cleared inside the gate"),
            }
            true
        });
        drop(stage);
        self.group().release(slots);
    }

    /// `mremap` moved a range: its pages have other addresses now.
    pub fn apply_remap(&self, gate: &Exclusive<'_>, from: PageRange, to: VirtualPage) {
        let target = PageRange {
            start: to,
            end: to.plus(from.pages()),
        };
        self.forget(gate, target, PageState::Hole);
        let mut moved = Vec::new();
        self.table.visit(from, |page, entry| {
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
                PageState::Moving(_) => PageState::Resident {
                    young: false,
                    shared: false,
                },
                // The claim is void; the fault releases its own count of the slot.
                PageState::Filling(slot) => {
                    self.must_duplicate(slot);
                    PageState::Swapped(slot)
                }
                other => other,
            };
            self.table.entry(page).set(state);
        }
        drop(stage);
        let mut regions = lock(&self.regions);
        regions.remove(from);
        regions.add(target);
        // A mapping that grew while it moved is larger than the event says.
        self.look_again.store(true, Ordering::Relaxed);
    }

    /// For a forked child before its program runs on: forgets what another thread had unmapped
    /// before the fork though its event was read later.
    pub fn keep_only_mapped(&self) {
        let Some(attached) = self.attached() else {
            return;
        };
        let (Ok(gate), Ok(areas)) = (self.exclusive(), attached.inspector.areas()) else {
            return;
        };
        let mut mapped = Regions::default();
        for area in areas {
            mapped.add(PageRange::of_addresses(area.start, area.end));
        }
        mapped.remove(attached.arena.whole);
        let managed = lock(&self.regions).ranges().to_vec();
        for range in managed {
            for gone in mapped.uncovered(range) {
                self.apply_unmap(&gate, gone);
            }
        }
    }

    fn must_duplicate(&self, slot: Slot) {
        self.group()
            .swap
            .duplicate(slot)
            .expect("a live slot can have another owner");
    }

    /// `fork`: the child sees every page as it was at that moment. No page was copied in or moved
    /// out since (the kernel refused, or the gate was held), so the states here are the child's.
    ///
    /// Gives the descriptor back if the parent is gone, and staged pages with it.
    pub fn apply_fork(
        self: &Arc<Self>,
        gate: &Exclusive<'_>,
        uffd: OwnedFd,
        mover: Mover,
    ) -> Result<Arc<AddressSpace>, OwnedFd> {
        let group = self.group();
        if !self.store_staged(gate) {
            return Err(uffd);
        }
        let beacon = self
            .attached()
            .map(|attached| attached.arena.beacon)
            .or(self.beacon());
        let child =
            AddressSpace::new(group.clone(), group.next_id(), uffd, mover).with_beacon(beacon);
        let shared = PageState::Resident {
            young: false,
            shared: true,
        };
        self.table.visit(PageTable::everything(), |page, entry| {
            let inherited = match entry.load() {
                PageState::Hole => return true,
                PageState::Resident { young, .. } => {
                    entry.set(PageState::Resident {
                        young,
                        shared: true,
                    });
                    shared
                }
                // Still in the parent's memory, as the batch is stale.
                PageState::Moving(_) => shared,
                PageState::Swapped(slot) | PageState::Filling(slot) => {
                    self.must_duplicate(slot);
                    PageState::Swapped(slot)
                }
                // What could not be stored is brought back before the fork is applied.
                PageState::Staged(_) | PageState::Returning(_) => {
                    unreachable!("staged pages were stored")
                }
                PageState::Clearing => unreachable!("pages are cleared inside the gate"),
                removed @ PageState::Removed(_) => removed,
            };
            child.table.entry(page).set(inherited);
            true
        });
        *lock(&child.regions) = lock(&self.regions).clone();
        self.leave_out_of_child(gate, &child);
        let resident = self.resident_pages();
        group.add_shared_pages(resident as u64);
        child.set_resident_pages(resident as u64);
        child.forked.store(true, Ordering::Relaxed);
        self.forked.store(true, Ordering::Relaxed);
        child.detached.store(true, Ordering::Relaxed);
        let child = Arc::new(child);
        group.add_space(child.clone());
        Ok(child)
    }

    /// Puts every staged page into the swap space, so that it can have two owners. `false` if
    /// they cannot be read any more, as only those of a dying program cannot.
    fn store_staged(&self, _gate: &Exclusive<'_>) -> bool {
        let mut staged: Vec<(VirtualPage, StageIndex)> = Vec::new();
        self.table.visit(PageTable::everything(), |page, entry| {
            if let PageState::Staged(place) | PageState::Returning(place) = entry.load() {
                staged.push((page, place));
            }
            true
        });
        let Some(attached) = self.attached() else {
            assert!(staged.is_empty(), "only attached spaces stage pages");
            return true;
        };
        let mut scratch = Scratch::new();
        let mut buffer = vec![[0u8; PAGE_SIZE]; 64];
        for chunk in staged.chunks(64) {
            let places: Vec<u64> = chunk
                .iter()
                .map(|(_, place)| self.stage_address(*place))
                .collect();
            let read = attached
                .inspector
                .read_pages(&places, buffer.as_flattened_mut());
            if !matches!(read, Ok(pages) if pages == chunk.len()) {
                return false;
            }
            for ((page, place), contents) in chunk.iter().zip(&buffer) {
                self.store_one_staged(*page, *place, contents, &mut scratch);
            }
        }
        true
    }

    fn store_one_staged(
        &self,
        page: VirtualPage,
        place: StageIndex,
        contents: &Page,
        scratch: &mut Scratch,
    ) {
        let group = self.group();
        // The pool's memory is the supervisor's own: without it nothing can go on.
        let slot = self.store(contents, scratch).unwrap_or_else(|error| {
            log::error!("a forking program's page cannot be stored: {error}");
            std::process::abort()
        });
        group.counters.pages_out.fetch_add(1, Ordering::Relaxed);
        self.table.entry(page).set(PageState::Swapped(slot));
        lock(&self.stage).retire(place);
    }

    /// Ranges that `madvise` keeps out of children, or wipes there, were not inherited.
    fn leave_out_of_child(&self, _gate: &Exclusive<'_>, child: &AddressSpace) {
        let Some(attached) = self.attached() else {
            return;
        };
        for (start, end) in attached.inspector.not_inherited().unwrap_or_default() {
            let range = PageRange::of_addresses(start, end);
            let mut slots = SlotRanges::new();
            child.table.visit(range, |_, entry| {
                if let PageState::Swapped(slot) = entry.take(PageState::Hole) {
                    slots.push(slot);
                }
                true
            });
            self.group().release(slots);
        }
    }
}
