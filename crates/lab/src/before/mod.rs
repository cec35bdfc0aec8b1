//! Published designs that others replaced. Nothing in the product depends on them.

mod array;
mod clusters;
pub mod device;
pub mod slots;
pub mod tree;
pub mod zsmalloc;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use memfold_swap::{LoadError, Location, Page, Scratch, Slot, SlotRange, StoreError};

use array::Padded;

/// What every swap space here can do, ours included.
pub trait SwapDesign: Send + Sync {
    /// Stores pages, each with a count of 1, and adds their slots to `out`.
    fn store(
        &self,
        thread: usize,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// Where the page of a slot is that the caller has a count of.
    fn look_up(&self, slot: Slot) -> Option<Location>;

    /// Copies the page of a slot that the caller has a count of.
    fn load(
        &self,
        thread: usize,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError>;

    /// Drops the count of each slot of each range, and frees what they held.
    fn release(&self, thread: usize, ranges: &[SlotRange]);

    /// How many pages there are.
    fn used(&self) -> u64;
}

/// Counters of pages and bytes, a set for each thread.
#[derive(Debug)]
struct ThreadStats(Vec<Padded<[AtomicU64; COUNTERS]>>);

/// Pages now, pages and bytes ever stored, pages ever loaded.
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
