//! Statistics of a space, counted without a shared cache line.

use std::cell::Cell;

use crate::{
    PAGE_SIZE,
    entry::TierKind,
    sync::atomic::{AtomicU32, AtomicU64, Ordering::*},
};

const TIERS: usize = TierKind::ALL.len();

/// Statistics of a space. They are read one after another, so they are consistent with each other
/// only while the space is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Resident bytes of the pool.
    pub pool_bytes: u64,
    /// Bytes of swap tables and of the records of the space and the pool.
    pub metadata_bytes: u64,
    /// Bytes of swap tables, annexes and cluster records, a part of the metadata: mostly 8 for each slot.
    pub table_bytes: u64,
    /// Slots with a page.
    pub slots_in_use: u64,
    /// Stored pages in all tiers.
    pub stored_pages: u64,
    /// Stored pages that repeat one word.
    pub same_filled_pages: u64,
    /// Stored pages that are not compressed.
    pub incompressible_pages: u64,
    /// Stored pages that were recompressed, alone or in blocks.
    pub recompressed_pages: u64,
    /// Stored pages in blocks.
    pub block_pages: u64,
    /// Bytes of the pool that freed pages take in blocks with others that are in use.
    pub dead_bytes: u64,
    /// Stored pages in the file.
    pub file_pages: u64,
    /// Bytes of the file that its pages take.
    pub file_bytes: u64,
    /// Stored pages in the store on other machines.
    pub remote_pages: u64,
    /// Bytes that pages take in the store on other machines, without its overhead.
    pub remote_bytes: u64,
    /// Bytes of the stored pages before compression.
    pub original_bytes: u64,
    /// Bytes of the stored pages in their tiers, without the pool's overhead.
    pub stored_bytes: u64,
    /// Pages stored so far.
    pub pages_stored_total: u64,
    /// Pages stored so far that repeated one word.
    pub same_filled_total: u64,
    /// Bytes that the pages stored so far took in their tiers.
    pub bytes_stored_total: u64,
    /// Bytes of the pages stored so far, before compression.
    pub bytes_original_total: u64,
    /// Pages recompressed so far, alone or in blocks.
    pub recompressed_total: u64,
    /// Pages put into blocks so far.
    pub block_total: u64,
    /// Pages written to the file so far.
    pub written_back_total: u64,
    /// Pages sent to the store on other machines so far.
    pub sent_total: u64,
    /// Pages loaded so far.
    pub pages_loaded_total: u64,
    /// Stores that failed.
    pub store_failures: u64,
    /// Loads that failed, because a tier could not read or because the page was corrupt.
    pub load_failures: u64,
}

/// Gauges are sums of wrapping differences: a single shard's value is meaningless.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    pages: [AtomicU64; TIERS],
    bytes: [AtomicU64; TIERS],
    pages_total: [AtomicU64; TIERS],
    bytes_total: [AtomicU64; TIERS],
    /// Pages that came from another tier.
    moved_total: [AtomicU64; TIERS],
    loads: AtomicU64,
    store_failures: AtomicU64,
    load_failures: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Counters {
    shards: Box<[Shard]>,
}

impl Counters {
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards).map(|_| Shard::default()).collect(),
        }
    }

    fn shard(&self) -> &Shard {
        &self.shards[thread_number() % self.shards.len()]
    }

    pub(crate) fn stored(&self, tier: TierKind, pages: u64, bytes: u64) {
        let (shard, tier) = (self.shard(), tier.index());
        shard.pages[tier].fetch_add(pages, Relaxed);
        shard.bytes[tier].fetch_add(bytes, Relaxed);
        shard.pages_total[tier].fetch_add(pages, Relaxed);
        shard.bytes_total[tier].fetch_add(bytes, Relaxed);
    }

    pub(crate) fn freed(&self, tier: TierKind, pages: u64, bytes: u64) {
        let (shard, tier) = (self.shard(), tier.index());
        shard.pages[tier].fetch_sub(pages, Relaxed);
        shard.bytes[tier].fetch_sub(bytes, Relaxed);
    }

    /// Accounts for a page that moved to another tier.
    pub(crate) fn moved(&self, from: (TierKind, u64), to: (TierKind, u64)) {
        let shard = self.shard();
        self.freed(from.0, 1, from.1);
        shard.pages[to.0.index()].fetch_add(1, Relaxed);
        shard.moved_total[to.0.index()].fetch_add(1, Relaxed);
        shard.bytes[to.0.index()].fetch_add(to.1, Relaxed);
    }

    pub(crate) fn loaded(&self) {
        self.shard().loads.fetch_add(1, Relaxed);
    }

    pub(crate) fn stores_failed(&self, pages: u64) {
        self.shard().store_failures.fetch_add(pages, Relaxed);
    }

    pub(crate) fn load_failed(&self) {
        self.shard().load_failures.fetch_add(1, Relaxed);
    }

    fn sum(&self, counter: impl Fn(&Shard) -> u64) -> u64 {
        let sum = self
            .shards
            .iter()
            .fold(0_u64, |sum, shard| sum.wrapping_add(counter(shard)));
        // A page of a batch may leave its tier before the batch is counted.
        if sum > u64::MAX / 2 { 0 } else { sum }
    }

    fn sum_tiers(&self, counters: impl Fn(&Shard) -> &[AtomicU64; TIERS]) -> u64 {
        self.sum(|shard| {
            counters(shard)
                .iter()
                .fold(0, |sum, tier| sum.wrapping_add(tier.load(Relaxed)))
        })
    }

    pub(crate) fn pages_in(&self, tier: TierKind) -> u64 {
        self.sum(|shard| shard.pages[tier.index()].load(Relaxed))
    }

    pub(crate) fn bytes_in(&self, tier: TierKind) -> u64 {
        self.sum(|shard| shard.bytes[tier.index()].load(Relaxed))
    }

    /// Pages put into a tier so far.
    fn arrived(&self, tier: TierKind) -> u64 {
        let index = tier.index();
        self.sum(|shard| {
            shard.pages_total[index]
                .load(Relaxed)
                .wrapping_add(shard.moved_total[index].load(Relaxed))
        })
    }

    /// The statistics, without those of the pool and the tables.
    pub(crate) fn usage(&self) -> Usage {
        let page = PAGE_SIZE as u64;
        let stored_pages = self.sum_tiers(|shard| &shard.pages);
        let pages_stored_total = self.sum_tiers(|shard| &shard.pages_total);
        let same_filled = TierKind::SameFilled.index();
        let block_pages = self.pages_in(TierKind::Block);
        let block_total = self.arrived(TierKind::Block);
        Usage {
            slots_in_use: stored_pages,
            stored_pages,
            same_filled_pages: self.pages_in(TierKind::SameFilled),
            incompressible_pages: self.pages_in(TierKind::Uncompressed),
            recompressed_pages: self.pages_in(TierKind::Recompressed) + block_pages,
            block_pages,
            file_pages: self.pages_in(TierKind::File),
            file_bytes: self.bytes_in(TierKind::File),
            remote_pages: self.pages_in(TierKind::Remote),
            remote_bytes: self.bytes_in(TierKind::Remote),
            original_bytes: stored_pages.wrapping_mul(page),
            stored_bytes: self.sum_tiers(|shard| &shard.bytes),
            pages_stored_total,
            same_filled_total: self.sum(|shard| shard.pages_total[same_filled].load(Relaxed)),
            bytes_stored_total: self.sum_tiers(|shard| &shard.bytes_total),
            bytes_original_total: pages_stored_total.wrapping_mul(page),
            recompressed_total: self.arrived(TierKind::Recompressed) + block_total,
            block_total,
            written_back_total: self.arrived(TierKind::File),
            sent_total: self.arrived(TierKind::Remote),
            pages_loaded_total: self.sum(|shard| shard.loads.load(Relaxed)),
            store_failures: self.sum(|shard| shard.store_failures.load(Relaxed)),
            load_failures: self.sum(|shard| shard.load_failures.load(Relaxed)),
            ..Usage::default()
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.shards.len() * size_of::<Shard>()
    }
}

/// A small number of the current thread.
pub(crate) fn thread_number() -> usize {
    const UNKNOWN: u32 = u32::MAX;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(UNKNOWN) };
    }
    NUMBER.with(|number| {
        if number.get() == UNKNOWN {
            number.set(NEXT.fetch_add(1, Relaxed) % UNKNOWN);
        }
        number.get() as usize
    })
}
