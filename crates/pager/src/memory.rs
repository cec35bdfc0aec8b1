//! The pool's memory: one reserved mapping of the supervisor's.

use memfold_sys::PAGE_SIZE;
use memfold_sys::memory::{Mapping, discard_all};
use std::ptr::NonNull;
use std::sync::Mutex;
use zsmalloc::{PageRun, PageSource, SourceError};

/// Reservations by `mmap`, given back page by page with `madvise`.
#[derive(Debug, Default)]
pub struct MappedSource {
    mappings: Mutex<Vec<Mapping>>,
}

// SAFETY: a reservation is a fresh private mapping, readable, writable, zero, page-aligned, kept in
// `mappings` until it is unreserved. Discarded pages read as zero and may be touched.
unsafe impl PageSource for MappedSource {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        let refused = SourceError::Reserve { pages };
        let length = pages.checked_mul(PAGE_SIZE).ok_or(refused)?;
        let mapping = Mapping::anonymous(length).map_err(|_| refused)?;
        let start = mapping.start();
        self.mappings
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
            .push(mapping);
        Ok(start)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, _pages: usize) {
        let mut mappings = self
            .mappings
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        mappings.retain(|mapping| mapping.start() != base);
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        let ranges = runs.iter().map(|run| (run.start, run.pages * PAGE_SIZE));
        // SAFETY: the caller's promise: whole pages of reservations, unused.
        unsafe { discard_all(ranges) }.map_err(|_| SourceError::Discard)
    }
}
