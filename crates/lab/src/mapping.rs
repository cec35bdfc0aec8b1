//! Pages from the system, for the pools of the experiments.

use std::ptr::NonNull;

use memfold_sys::{
    huge::{HUGE_PAGE_SIZE, HugePages, forbid_huge, size_to_ask_for, split_huge},
    memory::{self, discard_all},
};
use zsmalloc::{PAGE_SIZE, PageRun, PageSource, SourceError};

/// Anonymous private mappings; discarded pages go back with `MADV_DONTNEED`, and huge pages are had
/// whenever the system has any, however long that takes: no experiment times it.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mapping;

/// Keeps those who ask for huge pages apart.
static HUGE_PAGES: HugePages = HugePages::new();

// SAFETY: a reservation is a fresh anonymous mapping, readable, writable and zero, which stays
// until `munmap`. Discarded pages read as zero.
unsafe impl PageSource for Mapping {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        let bytes = pages * PAGE_SIZE;
        let mapping = memory::Mapping::aligned(bytes, HUGE_PAGE_SIZE)
            .map_err(|_| SourceError::Reserve { pages })?;
        let start = mapping.start();
        // It lives until `unreserve`.
        std::mem::forget(mapping);
        // A huge page nobody asked for would take memory for pages that were never used.
        // SAFETY: the range is the new mapping.
        let _ = unsafe { forbid_huge(start, bytes) };
        Ok(start)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller says that this is a reservation that nobody uses any more.
        unsafe { libc::munmap(base.as_ptr().cast(), pages * PAGE_SIZE) };
    }

    fn huge_pages(&self) -> usize {
        size_to_ask_for() / PAGE_SIZE
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        // SAFETY: the pool gives an aligned part of a reservation that it does not use yet.
        unsafe { HUGE_PAGES.populate_now(run.start, run.pages * PAGE_SIZE) }.is_some()
    }

    fn split_huge(&self, run: PageRun) {
        // What could not be split goes back when all of it does, or when memory is short.
        // SAFETY: the run lies in a reservation.
        let _ = unsafe { split_huge(run.start) };
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        let ranges = runs.iter().map(|run| (run.start, run.pages * PAGE_SIZE));
        // SAFETY: the caller says that the runs lie in a reservation and that nobody uses them.
        unsafe { discard_all(ranges) }.map_err(|_| SourceError::Discard)
    }
}
