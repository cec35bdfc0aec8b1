//! The pages that one fault claims, to load them and copy them in: the faulting one and its readahead
//! window.

use crate::density::{BLOCK, Density, has_ample_room};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{ClaimNumber, PageState};
use crate::replacement::Shadow;
use crate::supervised::reclaim::watermarks::Watermarks;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_swap::Slot;
use memfold_sys::PAGE_SIZE;
use std::sync::atomic::Ordering;

/// Maximum number of pages swapped in by one fault. Larger windows save faults and delay the faulting
/// thread.
pub(crate) const SWAP_IN_WINDOW: u32 = 16;

/// A page that a fault has claimed, with what its state said before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claimed {
    /// The page.
    pub page: VirtualPage,
    /// Its slot; the claim owns the reference.
    pub slot: Slot,
    /// When it was evicted.
    pub shadow: Shadow,
}

/// Pages in state `Filling` that one fault has claimed, in order. The claim owns one reference of each
/// slot, and belongs to the thread that made it.
pub(crate) struct Claim {
    pages: Vec<Claimed>,
    /// Index of the faulting page.
    faulting: usize,
    number: ClaimNumber,
}

impl Claim {
    /// Claims the page and its readahead window. `None` if the page is no longer swapped out.
    pub(crate) fn make(
        gate: &Shared<'_>,
        space: &AddressSpace,
        page: VirtualPage,
    ) -> Option<Claim> {
        debug_assert!(gate.is_of(space));
        let number = ClaimNumber::new(space.claims.fetch_add(1, Ordering::Relaxed));
        let take = |page: VirtualPage| {
            let entry = gate.table().entry(page);
            match entry.load() {
                state @ PageState::Swapped(slot, shadow)
                    if entry.replace(state, PageState::Filling(slot, number)) =>
                {
                    Some(Claimed { page, slot, shadow })
                }
                _ => None,
            }
        };
        let faulting_page = take(page)?;
        let mut advice =
            lock(&space.windows).swap_in(page, SWAP_IN_WINDOW, |block| swapped_of(gate, block));
        if advice.pages() < u64::from(SWAP_IN_WINDOW) && is_dense_with_room(gate, space, page) {
            advice = PageRange::around(page, u64::from(SWAP_IN_WINDOW));
        }
        let range = if advice.pages() > 1 {
            space.clip(page, advice)
        } else {
            advice
        };
        let mut pages: Vec<_> = (range.start.0..page.0)
            .filter_map(|number| take(VirtualPage(number)))
            .collect();
        let faulting = pages.len();
        pages.push(faulting_page);
        pages.extend((page.0 + 1..range.end.0).filter_map(|number| take(VirtualPage(number))));
        Some(Claim {
            pages,
            faulting,
            number,
        })
    }

    /// Claims up to [`SWAP_IN_WINDOW`] swapped-out pages of a range, without a fault.
    pub(crate) fn of_range(
        space: &AddressSpace,
        gate: &impl Inside,
        range: PageRange,
    ) -> Option<Claim> {
        let number = ClaimNumber::new(space.claims.fetch_add(1, Ordering::Relaxed));
        let mut pages = Vec::new();
        gate.table().visit(range, |page, entry| {
            if let state @ PageState::Swapped(slot, shadow) = entry.load()
                && entry.replace(state, PageState::Filling(slot, number))
            {
                pages.push(Claimed { page, slot, shadow });
            }
            pages.len() < SWAP_IN_WINDOW as usize
        });
        (!pages.is_empty()).then_some(Claim {
            pages,
            faulting: 0,
            number,
        })
    }

    /// Index of the faulting page.
    pub(crate) fn faulting(&self) -> usize {
        self.faulting
    }

    /// The slots of the pages.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.pages.iter().map(|claimed| claimed.slot)
    }

    /// Number of claimed pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// The page whose fault made the claim.
    pub(crate) fn faulting_page(&self) -> VirtualPage {
        self.pages[self.faulting].page
    }

    /// Leaves the slots to the end of the address space, as its gate cannot be entered any more: the thread
    /// that holds it may be changing the table.
    pub(crate) fn abandon(&self, space: &AddressSpace) {
        let pages = self.pages.iter();
        space.abandon_claims(
            pages.map(|claimed| (claimed.page, claimed.slot)),
            self.number,
        );
    }

    /// The page at an index.
    pub(crate) fn page(&self, index: usize) -> VirtualPage {
        self.pages[index].page
    }

    /// Its slot.
    pub(crate) fn slot(&self, index: usize) -> Slot {
        self.pages[index].slot
    }

    /// When the page at an index was evicted.
    pub(crate) fn shadow(&self, index: usize) -> Shadow {
        self.pages[index].shadow
    }

    /// The state that a page has while it is claimed.
    pub(crate) fn state(&self, index: usize) -> PageState {
        PageState::Filling(self.slot(index), self.number)
    }
}

/// Whether the block around a page is dense, and all of it fits well below the watermark at which
/// reclaim stops.
fn is_dense_with_room(gate: &Shared<'_>, space: &AddressSpace, page: VirtualPage) -> bool {
    let resources = &space.resources;
    let limit = resources.resident_limit_bytes();
    let wanted = (BLOCK * PAGE_SIZE) as u64;
    let stop = Watermarks::of(limit).stop;
    if !has_ample_room(resources.resident_bytes(), wanted, limit, stop) {
        return false;
    }
    let mut resident = 1;
    gate.table()
        .visit(PageRange::around(page, BLOCK as u64), |_, entry| {
            resident += usize::from(matches!(entry.load(), PageState::Resident { .. }));
            true
        });
    Density::of(resident) != Density::Sparse
}

/// Bitmap of the swapped-out pages of a block of 16 pages.
fn swapped_of(gate: &Shared<'_>, block: PageRange) -> u16 {
    let mut swapped = 0;
    gate.table().visit(block, |page, entry| {
        if matches!(entry.load(), PageState::Swapped(..)) {
            swapped |= 1 << (page.0 - block.start.0);
        }
        true
    });
    swapped
}
