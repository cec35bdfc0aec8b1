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
        let mut rest = runs;
        if rest.len() > 1 {
            rest = give_back_together(rest);
        }
        for run in rest {
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

/// How many runs one call takes: few enough for the stack, as giving memory back must need none.
const MAX_RANGES: usize = 512;

/// Gives runs back with one system call for many, which flushes the processors' address caches
/// once: a page in a run of four costs half as much as with a call a run. Returns the runs that
/// are left, which is all of them before Linux 6.13 (a process may not do this to itself there).
fn give_back_together(runs: &[PageRun]) -> &[PageRun] {
    const PIDFD_SELF: libc::c_int = -10_000;
    let mut ranges = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MAX_RANGES];
    let mut rest = runs;
    while !rest.is_empty() {
        let count = rest.len().min(MAX_RANGES);
        let mut bytes = 0;
        for (range, run) in ranges.iter_mut().zip(&rest[..count]) {
            range.iov_base = run.start.as_ptr().cast();
            range.iov_len = run.pages * PAGE_SIZE;
            bytes += range.iov_len;
        }
        // SAFETY: the ranges are those `discard` was given: nobody uses them.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                PIDFD_SELF,
                ranges.as_ptr(),
                count,
                libc::MADV_DONTNEED,
                0,
            )
        };
        if usize::try_from(done) != Ok(bytes) {
            return rest;
        }
        rest = &rest[count..];
    }
    rest
}
