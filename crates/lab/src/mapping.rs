//! Pages from the system, for the pools of the experiments.

use std::ptr::NonNull;

use zsmalloc::{PAGE_SIZE, PageRun, PageSource, SourceError};

/// Anonymous private mappings; discarded pages go back with `MADV_DONTNEED`.
#[derive(Debug, Default, Clone, Copy)]
pub struct Mapping;

// SAFETY: a reservation is a fresh anonymous mapping, readable, writable and zero, which stays
// until `munmap`. Discarded pages read as zero.
unsafe impl PageSource for Mapping {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(SourceError::Reserve { pages });
        }
        // A huge page would take memory for pages that were never used.
        // SAFETY: the range is the new mapping.
        unsafe { libc::madvise(address, pages * PAGE_SIZE, libc::MADV_NOHUGEPAGE) };
        NonNull::new(address.cast()).ok_or(SourceError::Reserve { pages })
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller says that this is a reservation that nobody uses any more.
        unsafe { libc::munmap(base.as_ptr().cast(), pages * PAGE_SIZE) };
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        for run in runs {
            let bytes = run.pages * PAGE_SIZE;
            // SAFETY: the caller says that the run lies in a reservation and that nobody uses it.
            let failed =
                unsafe { libc::madvise(run.start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
            if failed != 0 {
                return Err(SourceError::Discard);
            }
        }
        Ok(())
    }
}
