//! Designs that the published ones replaced, as baselines. No other crate depends on them.

mod array;
mod clusters;
pub mod device;
pub mod slots;
pub mod tree;
pub mod zsmalloc;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use memfold_swap::{LoadError, Location, Page, Scratch, Slot, SlotRange, StoreError};

use array::Padded;

/// The operations of every swap space measured here, memfold's included. `thread` selects the
/// cluster to allocate from, as the CPU does in the kernel.
pub trait SwapDesign: Send + Sync {
    /// Stores pages with a count of 1 each, and appends their slots to `out`.
    fn store(
        &self,
        thread: usize,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// The location of a slot's page. The caller holds a count.
    fn look_up(&self, slot: Slot) -> Option<Location>;

    /// Copies a slot's page to `out`. The caller holds a count.
    fn load(
        &self,
        thread: usize,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError>;

    /// Drops a count of each slot in the ranges and frees their pages.
    fn release(&self, thread: usize, ranges: &[SlotRange]);

    /// Number of pages stored.
    fn used(&self) -> u64;
}

/// Per-thread counters.
#[derive(Debug)]
struct ThreadStats(Vec<Padded<[AtomicU64; COUNTERS]>>);

/// Pages held; pages and bytes stored in total; pages loaded in total.
const COUNTERS: usize = 4;

impl ThreadStats {
    fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Padded::default()).collect())
    }

    fn stored(&self, thread: usize, pages: u64, bytes: u64) {
        let Padded([now, total, total_bytes, _]) = &self.0[thread % self.0.len()];
        now.fetch_add(pages, Relaxed);
        total.fetch_add(pages, Relaxed);
        total_bytes.fetch_add(bytes, Relaxed);
    }

    fn loaded(&self, thread: usize) {
        self.0[thread % self.0.len()].0[3].fetch_add(1, Relaxed);
    }

    fn freed(&self, thread: usize, pages: u64) {
        self.0[thread % self.0.len()].0[0].fetch_sub(pages, Relaxed);
    }

    fn pages(&self) -> u64 {
        let pages = |thread: &Padded<[AtomicU64; COUNTERS]>| thread.0[0].load(Relaxed);
        self.0.iter().map(pages).fold(0, u64::wrapping_add)
    }
}
