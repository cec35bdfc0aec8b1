//! Releasing slots, one by one and in bulk.

use zsmalloc::PageSource;

use crate::{
    allocator::Leaving,
    counts::Released,
    entry::{Location, TierKind},
    slot::{CLUSTER_SLOTS, ClusterId, Slot, SlotRange},
    space::SwapSpace,
    stored_bytes::StoredBytes,
};

/// Pages whose storage is freed at once. Bounds the memory that a release needs.
const RELEASE_BATCH: usize = 4096;

/// Storage of released slots, by tier, and emptied clusters.
#[derive(Debug, Default)]
struct ReleaseBatch {
    locations: [Vec<Location>; TierKind::ALL.len()],
    bytes: [u64; TierKind::ALL.len()],
    pages: usize,
    leaving: Leaving,
}

impl<S: PageSource> SwapSpace<S> {
    /// Drops the caller's count of `slot`. The last count frees the slot and its storage.
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn release(&self, slot: Slot) {
        let Released::Last(position) = self.table.entry(slot).release(slot, &self.overflow) else {
            return;
        };
        let tier = self.tier(position.tier);
        let bytes = tier.bytes(position.location);
        let mut stored = StoredBytes::default();
        stored.add(position.tier, bytes);
        self.uncharge(slot.cluster(), &stored);
        self.counters.freed(position.tier, 1, bytes);
        let mut leaving = Leaving::default();
        self.allocator.freed(slot.cluster(), 1, &mut leaving);
        tier.free(&mut [position.location]);
        self.allocator.give_back(leaving);
    }

    /// Uncharges the group of a cluster for freed pages. Their slots still count as used, so the
    /// cluster still belongs to the group.
    fn uncharge(&self, cluster: ClusterId, stored: &StoredBytes) {
        let groups = self.groups.read();
        stored.uncharge(groups.get(self.allocator.group_of(cluster)));
    }

    /// Drops a count of each of `slots`; a slot given twice loses two. Fastest in ascending order,
    /// as pages stored together mostly are: each cluster and each size class is then visited once.
    ///
    /// # Panics
    ///
    /// If one of the slots holds no page.
    pub fn release_bulk(&self, slots: &[Slot]) {
        if let [slot] = slots {
            // No lists for a single slot.
            return self.release(*slot);
        }
        let mut batch = ReleaseBatch::default();
        let mut sorted = Vec::new();
        for chunk in slots.chunks(RELEASE_BATCH) {
            let in_order = if chunk.is_sorted() {
                chunk
            } else {
                sorted.clear();
                sorted.extend_from_slice(chunk);
                sorted.sort_unstable();
                &sorted
            };
            for neighbours in in_order.chunk_by(|one, next| one.cluster() == next.cluster()) {
                let slots = neighbours.iter().copied();
                self.release_in(neighbours[0].cluster(), slots, &mut batch);
            }
            self.finish(&mut batch);
        }
    }

    /// Drops a count of each slot of each range, as [`release_bulk`](Self::release_bulk).
    ///
    /// # Panics
    ///
    /// If one of the slots holds no page.
    pub fn release_ranges(&self, ranges: &[SlotRange]) {
        if let [range] = ranges
            && range.count() == 1
        {
            return self.release(range.start());
        }
        let mut batch = ReleaseBatch::default();
        for &range in ranges {
            let mut rest = range;
            while rest.count() > 0 {
                let left_in_cluster = CLUSTER_SLOTS - rest.start().index();
                let here = rest.split_off_front(left_in_cluster as u32);
                let first = here.start().into_raw();
                let slots = (first..first + here.count()).map(Slot::from_raw);
                self.release_in(here.start().cluster(), slots, &mut batch);
                if batch.pages >= RELEASE_BATCH {
                    self.finish(&mut batch);
                }
            }
        }
        self.finish(&mut batch);
    }

    /// Drops a count of each slot, all in one cluster.
    fn release_in(
        &self,
        cluster: ClusterId,
        slots: impl Iterator<Item = Slot>,
        batch: &mut ReleaseBatch,
    ) {
        let mut freed = 0;
        let mut stored = StoredBytes::default();
        for slot in slots {
            if let Released::Last(position) = self.table.entry(slot).release(slot, &self.overflow) {
                let bytes = self.tier(position.tier).bytes(position.location);
                stored.add(position.tier, bytes);
                batch.locations[position.tier.index()].push(position.location);
                freed += 1;
            }
        }
        if freed > 0 {
            self.uncharge(cluster, &stored);
            for (tier, _, bytes) in stored.tiers() {
                batch.bytes[tier.index()] += bytes;
            }
            batch.pages += freed as usize;
            self.allocator.freed(cluster, freed, &mut batch.leaving);
        }
    }

    /// Frees what a batch has collected.
    fn finish(&self, batch: &mut ReleaseBatch) {
        for kind in TierKind::ALL {
            let locations = &mut batch.locations[kind.index()];
            if !locations.is_empty() {
                let bytes = std::mem::take(&mut batch.bytes[kind.index()]);
                self.counters.freed(kind, locations.len() as u64, bytes);
                self.tier(kind).free(locations);
                locations.clear();
            }
        }
        batch.pages = 0;
        self.allocator.give_back(std::mem::take(&mut batch.leaving));
    }
}
