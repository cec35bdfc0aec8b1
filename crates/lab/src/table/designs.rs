//! memfold's swap space as one of the designs, and cheap tiers, so that the designs dominate the
//! cost.

use std::{ptr::NonNull, sync::Arc};

use anyhow::Result;
use memfold_swap::{
    LoadError, Location, PAGE_SIZE, Page, Placed, Scratch, Slot, SlotRange, StoreError, Stored,
    SwapConfig, SwapSpace, Tier, TierKind,
};
use zsmalloc::PageSource;

use crate::{baselines::SwapDesign, mapping::Mapping};

/// Stored size that the tiers report for every page, in bytes. Only the charges of groups depend on
/// it.
const BYTES: u64 = 2048;

/// A tier that stores nothing: a location is computed from the slot.
#[derive(Debug)]
pub struct Nowhere;

impl Nowhere {
    /// The location it returns for a slot's page.
    pub fn location(slot: Slot) -> Location {
        Location::from_raw(u64::from(slot.into_raw()) ^ 0x5a5a_5a5a)
    }
}

impl Tier for Nowhere {
    fn kind(&self) -> TierKind {
        TierKind::Compressed
    }

    fn store(&self, slot: Slot, _: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        Ok(Placed::At(Self::location(slot)))
    }

    fn load(&self, _: Stored<'_>, _: &mut Page, _: &mut Scratch) -> Result<(), LoadError> {
        Ok(())
    }

    fn free(&self, _: &mut [Location]) {}

    fn bytes(&self, _: Location) -> u64 {
        BYTES
    }
}

/// A swap device in memory, as the PMEM of the published runs: pages are copied to and from the
/// index of their slot.
#[derive(Debug)]
pub struct MemoryDevice {
    base: NonNull<Page>,
    pages: usize,
}

// SAFETY: only the thread that reserved a slot writes its page, and only holders of a count read
// it; the design that allocates the slots keeps the two apart.
unsafe impl Send for MemoryDevice {}
// SAFETY: as above.
unsafe impl Sync for MemoryDevice {}

impl MemoryDevice {
    /// A device for slots below `pages`.
    pub fn new(pages: usize) -> Result<Self> {
        let base = Mapping.reserve(pages)?.cast();
        Ok(Self { base, pages })
    }

    fn place(&self, location: Location) -> *mut Page {
        let index = location.into_raw() as usize;
        assert!(index < self.pages, "the device is smaller than that");
        // SAFETY: the place lies in the mapping.
        unsafe { self.base.as_ptr().add(index) }
    }
}

impl Drop for MemoryDevice {
    fn drop(&mut self) {
        // SAFETY: `reserve` returned this range, and no reference into it is left.
        unsafe { Mapping.unreserve(self.base.cast(), self.pages) }
    }
}

impl Tier for MemoryDevice {
    fn kind(&self) -> TierKind {
        TierKind::Compressed
    }

    fn store(&self, slot: Slot, page: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        let location = Location::from_raw(slot.into_raw().into());
        // SAFETY: the slot is being filled, so that its place is the caller's alone.
        unsafe { self.place(location).copy_from_nonoverlapping(page, 1) };
        Ok(Placed::At(location))
    }

    fn load(&self, stored: Stored<'_>, out: &mut Page, _: &mut Scratch) -> Result<(), LoadError> {
        // SAFETY: the caller holds a count of the slot, so no thread writes its page.
        unsafe { self.place(stored.location()).copy_to_nonoverlapping(out, 1) };
        Ok(())
    }

    fn free(&self, _: &mut [Location]) {}

    fn bytes(&self, _: Location) -> u64 {
        BYTES
    }
}

/// memfold's swap space.
pub struct Ours(pub SwapSpace<Mapping>);

impl Ours {
    /// A space with `tier` instead of its own tier of that kind. Of a known type, so that a call of it is one
    /// indirect call, as in the other designs.
    pub fn with_tier<T: Tier + 'static>(
        slots: usize,
        threads: usize,
        tier: &Arc<T>,
    ) -> Result<Self> {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 16,
            max_slots: slots,
            shards: threads,
            ..SwapConfig::default()
        };
        let space = SwapSpace::with_tiers(Mapping, config, |own| {
            if own.kind() == tier.kind() {
                Box::new(Arc::clone(tier))
            } else {
                own
            }
        })?;
        Ok(Self(space))
    }
}

impl SwapDesign for Ours {
    fn store(
        &self,
        _: usize,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let mut stored = Vec::with_capacity(pages.len());
        self.0.store_batch(pages, scratch, &mut stored);
        for slot in stored {
            out.push(slot?);
        }
        Ok(())
    }

    #[inline]
    fn look_up(&self, slot: Slot) -> Option<Location> {
        self.0.look_up(slot).map(|(_, location)| location)
    }

    fn load(
        &self,
        _: usize,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.0.load(slot, out, scratch)
    }

    fn release(&self, _: usize, ranges: &[SlotRange]) {
        self.0.release_ranges(ranges);
    }

    fn used(&self) -> u64 {
        self.0.usage().slots_in_use
    }
}

/// A page that is not same-filled.
pub fn some_page() -> Page {
    let mut page = [0; PAGE_SIZE];
    page[0] = 1;
    page
}
