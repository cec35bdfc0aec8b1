//! One page source for pool and swap tables.

use std::{ptr::NonNull, sync::Arc};

use zsmalloc::{PageRun, PageSource, SourceError};

/// The page source, shared by the pool and the swap tables.
#[derive(Debug)]
pub(crate) struct SharedSource<S>(pub(crate) Arc<S>);

// SAFETY: all methods forward to the shared source, which upholds the contract.
unsafe impl<S: PageSource> PageSource for SharedSource<S> {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        self.0.reserve(pages)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.0.unreserve(base, pages) }
    }

    fn commit(&self, run: PageRun) -> Result<(), SourceError> {
        self.0.commit(run)
    }

    fn huge_pages(&self) -> usize {
        self.0.huge_pages()
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        self.0.populate_huge(run)
    }

    fn split_huge(&self, run: PageRun) {
        self.0.split_huge(run);
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.0.discard(runs) }
    }
}
