//! Dropping counts, one by one and in bulk.

use zsmalloc::PageSource;

use crate::{
    allocator::Leaving,
    entry::{Location, Released, TierKind},
    slot::{ClusterId, Slot},
    space::SwapSpace,
};

/// Slots released at once; bounds the memory that a release of any length needs.
const RELEASE_BATCH: usize = 4096;

/// Storage of released slots, by tier, freed together.
#[derive(Debug, Default)]
struct ReleaseBatch {
    locations: [Vec<Location>; TierKind::ALL.len()],
}

impl<S: PageSource> SwapSpace<S> {
    /// Drops the caller's count of `slot`. With the last one the slot and its storage are freed.
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn release(&self, slot: Slot) {
        let Released::Last(position) = self.table.entry(slot).release(slot, &self.overflow) else {
            return;
        };
        let mut leaving = Leaving::default();
        self.allocator.freed(slot.cluster(), 1, &mut leaving);
        self.free(position.tier, &mut [position.location]);
        self.allocator.give_back(leaving);
    }

    /// Drops a count of each of `slots`; a slot given twice loses two. Cheapest for slots in
    /// ascending order, which those of pages stored together mostly are: each cluster and each
    /// class of the pool is then visited once.
    ///
    /// # Panics
    ///
    /// If one of the slots holds no page.
    pub fn release_bulk(&self, slots: &[Slot]) {
        let mut batch = ReleaseBatch::default();
        let mut sorted = Vec::new();
        for chunk in slots.chunks(RELEASE_BATCH) {
            if chunk.is_sorted() {
                self.release_chunk(chunk, &mut batch);
            } else {
                sorted.clear();
                sorted.extend_from_slice(chunk);
                sorted.sort_unstable();
                self.release_chunk(&sorted, &mut batch);
            }
        }
    }

    fn release_chunk(&self, slots: &[Slot], batch: &mut ReleaseBatch) {
        let mut leaving = Leaving::default();
        for neighbours in slots.chunk_by(|one, next| one.cluster() == next.cluster()) {
            let cluster: ClusterId = neighbours[0].cluster();
            let mut freed = 0;
            for &slot in neighbours {
                if let Released::Last(position) =
                    self.table.entry(slot).release(slot, &self.overflow)
                {
                    batch.locations[position.tier.index()].push(position.location);
                    freed += 1;
                }
            }
            if freed > 0 {
                self.allocator.freed(cluster, freed, &mut leaving);
            }
        }
        for kind in TierKind::ALL {
            let locations = &mut batch.locations[kind.index()];
            if !locations.is_empty() {
                self.free(kind, locations);
                locations.clear();
            }
        }
        self.allocator.give_back(leaving);
    }

    /// Frees storage that no entry names any more.
    pub(crate) fn free(&self, kind: TierKind, locations: &mut [Location]) {
        let tier = self.tier(kind);
        let bytes = locations.iter().map(|&location| tier.bytes(location)).sum();
        self.counters.freed(kind, locations.len() as u64, bytes);
        tier.free(locations);
    }
}
