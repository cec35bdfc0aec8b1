//! The swap tables: 8 bytes for each slot, in pages that are committed and discarded with their
//! cluster.
//!
//! One range of addresses is reserved for the largest possible space, and a cluster's table is the
//! page at its place in it. So a look-up is an addition and takes no lock: there is no directory to
//! read, and nothing that could be freed under a reader. A cluster is discarded only when all its
//! entries are free, that is zero, and a discarded page reads as zero: a late reader sees the same
//! free entries before and after.

use std::{ptr::NonNull, sync::Arc};

use zsmalloc::{PageRun, PageSource, SourceError};

use crate::{
    PAGE_SIZE,
    entry::EntryCell,
    slot::{CLUSTER_SLOTS, ClusterId, Slot},
    sync::atomic::{AtomicU32, AtomicU64},
};

/// The record of a cluster.
#[derive(Debug)]
#[repr(C, align(32))]
pub(crate) struct ClusterMeta {
    /// Slots that are not free.
    pub(crate) used: AtomicU32,
    /// Where the cluster is: one of the allocator's `home` values. Changed under the allocator's
    /// lock.
    pub(crate) home: AtomicU32,
    /// Its index in the list of partly used clusters. Used under the allocator's lock.
    pub(crate) list_index: AtomicU32,
    /// Whether its annex page is committed. Changed under the allocator's lock.
    pub(crate) has_annex: AtomicU32,
    /// Walks in progress over its entries, which keep it from being discarded. Changed under the
    /// allocator's lock.
    pub(crate) walkers: AtomicU32,
    /// The index of its group. Changed under the allocator's lock.
    pub(crate) group: AtomicU32,
}

pub(crate) const METAS_PER_PAGE: usize = PAGE_SIZE / size_of::<ClusterMeta>();

const _: () = assert!(size_of::<EntryCell>() * CLUSTER_SLOTS == PAGE_SIZE);
const _: () = assert!(METAS_PER_PAGE == 128);

/// The entries, annex words and cluster records of a space.
#[derive(Debug)]
pub(crate) struct SwapTable<S: PageSource> {
    source: Arc<S>,
    /// Entries of all clusters, then annex words of all clusters, then their records.
    base: NonNull<u8>,
    clusters: usize,
}

// SAFETY: `base` is a reservation that this table alone owns until it is dropped, and all that is
// read from or written to it is atomic.
unsafe impl<S: PageSource> Send for SwapTable<S> {}
// SAFETY: as for `Send`.
unsafe impl<S: PageSource> Sync for SwapTable<S> {}

/// A page of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TablePage {
    Entries(ClusterId),
    Annex(ClusterId),
    /// The page of cluster records with this index.
    Metas(usize),
}

impl<S: PageSource> SwapTable<S> {
    /// Reserves address space for `clusters` clusters, including the unused cluster 0.
    pub(crate) fn new(source: Arc<S>, clusters: usize) -> Result<Self, SourceError> {
        let base = source.reserve(total_pages(clusters))?;
        Ok(Self {
            source,
            base,
            clusters,
        })
    }

    /// The number of clusters, including the unused cluster 0.
    pub(crate) fn clusters(&self) -> usize {
        self.clusters
    }

    /// The entry of `slot`.
    ///
    /// # Panics
    ///
    /// If no slot can have this number.
    #[inline]
    pub(crate) fn entry(&self, slot: Slot) -> &EntryCell {
        self.check(slot);
        // SAFETY: `check` ensures that the slot's cluster lies in the reservation, whose memory
        // stays readable and writable while `self` lives and starts as zero. An `EntryCell` is an
        // `AtomicU64`, for which any bytes are valid, and the page source aligns to a page.
        unsafe {
            &*self
                .base
                .as_ptr()
                .cast::<EntryCell>()
                .add(slot.into_raw() as usize)
        }
    }

    /// The annex word of `slot`.
    ///
    /// # Panics
    ///
    /// If no slot can have this number.
    #[inline]
    pub(crate) fn annex(&self, slot: Slot) -> &AtomicU64 {
        self.check(slot);
        let index = self.clusters * CLUSTER_SLOTS + slot.into_raw() as usize;
        // SAFETY: as in `entry`; the annex words follow the entries of all clusters.
        unsafe { &*self.base.as_ptr().cast::<AtomicU64>().add(index) }
    }

    /// The record of a cluster.
    #[inline]
    pub(crate) fn meta(&self, cluster: ClusterId) -> &ClusterMeta {
        assert!(
            cluster.number() < self.clusters,
            "no such cluster: {}",
            cluster.0
        );
        let offset = 2 * self.clusters * PAGE_SIZE + cluster.number() * size_of::<ClusterMeta>();
        // SAFETY: as in `entry`; the records follow the annex words. A record consists of atomics
        // for which any bytes are valid, and is aligned to 32 bytes, its size.
        unsafe { &*self.base.as_ptr().add(offset).cast::<ClusterMeta>() }
    }

    /// Whether a slot can have this number.
    #[inline]
    pub(crate) fn has(&self, slot: Slot) -> bool {
        (1..self.clusters).contains(&slot.cluster().number())
    }

    #[inline]
    fn check(&self, slot: Slot) {
        assert!(self.has(slot), "no such swap slot: {slot:?}");
    }

    fn page(&self, page: TablePage) -> usize {
        match page {
            TablePage::Entries(cluster) => cluster.number(),
            TablePage::Annex(cluster) => self.clusters + cluster.number(),
            TablePage::Metas(index) => 2 * self.clusters + index,
        }
    }

    fn run(&self, page: usize) -> PageRun {
        assert!(page < total_pages(self.clusters));
        // SAFETY: the page lies in the reservation.
        let start = unsafe { self.base.add(page * PAGE_SIZE) };
        PageRun { start, pages: 1 }
    }

    /// Commits a page before it is used.
    pub(crate) fn commit(&self, page: TablePage) -> Result<(), SourceError> {
        self.source.commit(self.run(self.page(page)))
    }

    /// Discards pages of emptied clusters.
    ///
    /// # Safety
    ///
    /// The pages must not be written until they are committed again, and their entries must all be
    /// zero.
    pub(crate) unsafe fn discard(&self, pages: &[TablePage]) -> Result<(), SourceError> {
        let mut numbers: Vec<_> = pages.iter().map(|&page| self.page(page)).collect();
        numbers.sort_unstable();
        let mut runs: Vec<PageRun> = Vec::new();
        let mut end = usize::MAX;
        for number in numbers {
            match runs.last_mut() {
                Some(run) if number == end => run.pages += 1,
                _ => runs.push(self.run(number)),
            }
            end = number + 1;
        }
        // SAFETY: the runs lie in the reservation. The caller guarantees that entries and annex
        // words of these clusters are unused (a count would keep a cluster from being empty).
        unsafe { self.source.discard(&runs) }
    }
}

impl<S: PageSource> Drop for SwapTable<S> {
    fn drop(&mut self) {
        // SAFETY: `base` is what `reserve` gave for this many pages, and every reference into it
        // borrows `self`.
        unsafe { self.source.unreserve(self.base, total_pages(self.clusters)) }
    }
}

fn total_pages(clusters: usize) -> usize {
    2 * clusters + clusters.div_ceil(METAS_PER_PAGE)
}
