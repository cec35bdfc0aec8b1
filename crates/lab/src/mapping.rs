//! The page source of the experiments' pools: anonymous memory.

use std::ptr::NonNull;

use memfold_sys::{
    huge::{HUGE_PAGE_SIZE, HugePages, forbid_huge, size_to_ask_for, split_huge},
    memory::{self, discard_all},
};
use zsmalloc::{PAGE_SIZE, PageRun, PageSource, SourceError};

/// Anonymous private mappings. `MADV_DONTNEED` frees discarded pages. Huge pages are populated
/// whenever the kernel can allocate them, direct compaction included: no experiment times this.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mapping;

/// Serialises callers that populate huge pages.
static HUGE_PAGES: HugePages = HugePages::new();

// SAFETY: a reservation is a fresh anonymous mapping, readable, writable and zero, which stays
// until `munmap`. Discarded pages read as zero.
unsafe impl PageSource for Mapping {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        let bytes = pages * PAGE_SIZE;
        let mapping = memory::Mapping::aligned(bytes, HUGE_PAGE_SIZE)
            .map_err(|_| SourceError::Reserve { pages })?;
        let start = mapping.start();
        // Unmapped by `unreserve`.
        std::mem::forget(mapping);
        // With THP `always`, a first touch would allocate a huge page and inflate the figures.
        // SAFETY: the range is the new mapping.
        let _ = unsafe { forbid_huge(start, bytes) };
        Ok(start)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller guarantees that this is a reservation without references to it.
        unsafe { libc::munmap(base.as_ptr().cast(), pages * PAGE_SIZE) };
    }

    fn huge_pages(&self) -> usize {
        size_to_ask_for() / PAGE_SIZE
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        // SAFETY: the pool passes an aligned part of a reservation that it does not use yet.
        unsafe { HUGE_PAGES.populate_now(run.start, run.pages * PAGE_SIZE) }.is_some()
    }

    fn split_huge(&self, run: PageRun) {
        // A huge page that could not be split is freed as a whole, or by the kernel under pressure.
        // SAFETY: the run lies in a reservation.
        let _ = unsafe { split_huge(run.start) };
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        let ranges = runs.iter().map(|run| (run.start, run.pages * PAGE_SIZE));
        // SAFETY: the caller guarantees that the runs lie in a reservation and are unused.
        unsafe { discard_all(ranges) }.map_err(|_| SourceError::Discard)
    }
}
