//! Deduplication between relatives.
//!
//! A page that both sides of a fork page out is stored once: the second page-out finds the slot of a
//! relative at the same address, and takes a count of it if the contents are the same.

use crate::page::VirtualPage;
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Slots of relatives that a page is compared with, at most.
const CANDIDATES: usize = 3;
/// How long storing waits for a relative's gate before it does without.
const PATIENCE: Duration = Duration::from_micros(500);

/// Slots in which relatives keep what may be the same pages; a count of each is held.
pub struct DedupCandidates {
    candidates: Vec<Vec<Slot>>,
}

impl DedupCandidates {
    /// Looks at the same addresses in the relatives of `space`. No gate may be held.
    pub fn find(space: &AddressSpace, pages: impl Iterator<Item = VirtualPage>) -> DedupCandidates {
        let pages: Vec<VirtualPage> = pages.collect();
        let mut candidates = vec![Vec::new(); pages.len()];
        if !space.fork.forked.load(Ordering::Relaxed) {
            return DedupCandidates { candidates };
        }
        for relative in space.fork.family.others(space) {
            let any = relative.try_shared().is_some_and(|gate| {
                let slot = |page: &VirtualPage| gate.table().swapped_slot(*page);
                pages.iter().any(|page| slot(page).is_some())
            });
            if !any {
                continue;
            }
            // While the gate is held alone, a slot that a page state names stays that page's.
            let Ok(gate) = relative.exclusive_within(PATIENCE) else {
                continue;
            };
            for (page, found) in pages.iter().zip(&mut candidates) {
                if found.len() < CANDIDATES
                    && let Some(slot) = gate.table().swapped_slot(*page)
                    && !found.contains(&slot)
                    && space.resources.swap.duplicate(slot).is_ok()
                {
                    found.push(slot);
                }
            }
        }
        DedupCandidates { candidates }
    }

    /// The slot that holds the same as `contents`, for the page of that index; its count is the
    /// caller's now.
    pub fn take(
        &mut self,
        index: usize,
        contents: &Page,
        group: &Group,
        scratch: &mut Scratch,
    ) -> Option<Slot> {
        let mut buffer = [0; PAGE_SIZE];
        let candidates = &mut self.candidates[index];
        // What cannot be read is stored anew; the swap space counts the error.
        let same = candidates.iter().position(|slot| {
            group
                .resources
                .swap
                .load(*slot, &mut buffer, scratch)
                .is_ok()
                && buffer == *contents
        })?;
        Some(candidates.swap_remove(same))
    }

    /// Gives back what was not taken.
    pub fn release(self, group: &Group) {
        let spare: Vec<Slot> = self.candidates.into_iter().flatten().collect();
        group.resources.swap.release_bulk(&spare);
    }
}
