//! Staged pages at a fork: they are copied out and stored, so that both sides can own them.

use crate::page::VirtualPage;
use crate::page_state::{PageState, StageIndex};
use crate::page_table::PageTable;
use crate::supervised::reclaim::batch::Batch;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::{Page, Scratch};
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// What was in the stage, copied out before the event of a fork was read: from then on the parent
/// runs, and may be gone before its memory can be read.
pub type Stash = HashMap<StageIndex, Page>;

impl AddressSpace {
    /// Before events are read among which a fork may be: copies the stage. The gate is held
    /// exclusively, so nothing is staged or returned until they are applied.
    pub fn stash(&self, gate: &Exclusive<'_>) -> Stash {
        let Some(attached) = self.attached() else {
            return Stash::new();
        };
        // What the helper moved already is staged.
        Batch::settle(self, gate);
        let staged = self.staged_pages(gate);
        let places: Vec<StageIndex> = staged.iter().map(|(_, place)| *place).collect();
        let addresses: Vec<u64> = places
            .iter()
            .map(|place| self.stage_address(*place))
            .collect();
        let mut buffer = vec![[0u8; PAGE_SIZE]; places.len()];
        // What cannot be read is missed, and said, where it is needed.
        let read = attached
            .inspector
            .read_pages(&addresses, buffer.as_flattened_mut())
            .unwrap_or(0);
        places
            .into_iter()
            .zip(buffer.into_iter().take(read))
            .collect()
    }

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

    /// Puts every staged page into the swap space, so that it can have two owners. What the stash
    /// lacks is read now.
    pub fn store_staged(&self, gate: &Exclusive<'_>, stash: Option<Stash>) {
        let mut contents = stash.unwrap_or_default();
        let staged = self.staged_pages(gate);
        if staged
            .iter()
            .any(|(_, place)| !contents.contains_key(place))
        {
            contents.extend(self.stash(gate));
        }
        let mut scratch = Scratch::new();
        for (page, place) in staged {
            if let Some(contents) = contents.get(&place) {
                self.store_one_staged(gate, page, place, contents, &mut scratch);
            }
        }
    }

    /// Whether pages are still staged though a fork is applied: those of a parent that is gone.
    pub fn has_staged(&self, gate: &Exclusive<'_>) -> bool {
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
                // It stays in the stage: the parent has it, the child counts as having lost it.
                log::error!("a forking program's page cannot be stored: {error}");
                return;
            }
        };
        self.resources
            .counters
            .pages_out
            .fetch_add(1, Ordering::Relaxed);
        gate.table().entry(page).set(PageState::Swapped(slot));
        lock(&self.stage).retire(place);
    }
}
