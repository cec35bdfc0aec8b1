//! Deduplication between relatives.
//!
//! A page that both sides of a fork page out is stored once: the second page-out takes a reference of
//! the relative's slot at the same address if the contents are equal.

use crate::page::VirtualPage;
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum number of slots that a page is compared with. More finds more duplicates and loads more
/// pages.
const CANDIDATES: usize = 3;
/// Longest wait for a relative's gate. Longer finds more duplicates and delays reclaim.
const PATIENCE: Duration = Duration::from_micros(500);

/// Slots of relatives at the same addresses, with one reference each. A round owns it.
pub(crate) struct DedupCandidates {
    /// For each page.
    candidates: Vec<Vec<Slot>>,
}

impl DedupCandidates {
    /// Finds the slots at the same addresses in the relatives of `space`. The caller holds no gate.
    pub(crate) fn find(
        space: &AddressSpace,
        pages: impl Iterator<Item = VirtualPage>,
    ) -> DedupCandidates {
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
            // Under the exclusive gate, a slot in a page state cannot be released.
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

    /// A slot with the same contents for the page at `index`. The caller owns its reference.
    pub(crate) fn take(
        &mut self,
        index: usize,
        contents: &Page,
        group: &Group,
        scratch: &mut Scratch,
    ) -> Option<Slot> {
        let candidates = &mut self.candidates[index];
        if candidates.is_empty() {
            return None;
        }
        let mut buffer = [0; PAGE_SIZE];
        // A page whose candidate cannot be loaded, or only from other machines, for which reclaim must
        // not wait, is stored anew.
        let same = candidates.iter().position(|slot| {
            group
                .resources
                .swap
                .load_near(*slot, &mut buffer, scratch)
                .is_ok()
                && buffer == *contents
        })?;
        Some(candidates.swap_remove(same))
    }

    /// Releases the references that were not taken.
    pub(crate) fn release(self, group: &Group) {
        let unused: Vec<Slot> = self.candidates.into_iter().flatten().collect();
        group.resources.swap.release_bulk(&unused);
    }
}
