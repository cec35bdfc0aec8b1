//! Staged pages at a fork: they are stored, so that parent and child can own a reference of each.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, StageIndex};
use crate::page_table::PageTable;
use crate::supervised::kernel::Process;
use crate::supervised::reclaim::batch::{Batch, Overrun};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::{Page, Scratch};
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::Ordering;

impl AddressSpace {
    fn staged_pages(&self, gate: &Exclusive<'_>) -> Vec<(VirtualPage, StageIndex)> {
        let mut staged = Vec::new();
        if lock(&self.stage).live() == 0 {
            return staged;
        }
        gate.table().visit(PageTable::everything(), |page, entry| {
            if let PageState::Staged(place) | PageState::Returning(place) = entry.load() {
                staged.push((page, place));
            }
            true
        });
        staged
    }

    /// Stores every staged page in the swap space, so that its slot can have two owners. The gate is held exclusively,
    /// so no page is staged or returned until the events are applied.
    pub(crate) fn store_staged(&self, gate: &Exclusive<'_>) {
        // Pages that the helper has moved become staged.
        Batch::settle(self, gate);
        let staged = self.staged_pages(gate);
        let Some(attached) = self.attached().filter(|_| !staged.is_empty()) else {
            return;
        };
        let places = staged.iter();
        let addresses: Vec<u64> = places
            .map(|(_, place)| self.stage_address(*place))
            .collect();
        let mut buffer = vec![[0u8; PAGE_SIZE]; staged.len()];
        // `apply_fork` finds those that cannot be read and stay staged.
        let inspector = &attached.inspector;
        let read = inspector.copy_out(&addresses, buffer.as_flattened_mut());
        let mut scratch = Scratch::new();
        let contents = buffer.iter().take(read.unwrap_or(0));
        for ((page, place), contents) in staged.into_iter().zip(contents) {
            self.store_one_staged(gate, page, place, contents, &mut scratch);
        }
    }

    /// Whether pages are staged. When a fork is applied, these could not be stored.
    pub(crate) fn has_staged(&self, gate: &Exclusive<'_>) -> bool {
        !self.staged_pages(gate).is_empty()
    }

    fn store_one_staged(
        &self,
        gate: &Exclusive<'_>,
        page: VirtualPage,
        place: StageIndex,
        contents: &Page,
        scratch: &mut Scratch,
    ) {
        let slot = match self.store(contents, scratch) {
            Ok(slot) => slot,
            Err(error) => {
                // The page stays in the stage, so the child has lost it.
                log::error!(
                    "cannot store a page of a forking program ({error}); its child will be killed"
                );
                return;
            }
        };
        self.resources
            .counters
            .pages_out
            .fetch_add(1, Ordering::Relaxed);
        gate.table()
            .entry(page)
            .set(PageState::Swapped(slot, self.resources.refaults.shadow()));
        lock(&self.stage).retire(place);
        // What is there may be another page, which was moved to where the run was.
        let mut stored = Overrun::default();
        stored
            .unmapped
            .add(PageRange::around(self.stage_page(place), 1));
        self.note_overrun(&stored);
    }
}
