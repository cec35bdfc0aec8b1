//! Page sources: the memory behind a pool.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt::Debug,
    ptr::NonNull,
    sync::Mutex,
};

use crate::geometry::PAGE_SIZE;

/// A page source refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// No address space for `pages` pages.
    #[error("could not reserve address space for {pages} pages")]
    Reserve {
        /// How many pages were asked for.
        pages: usize,
    },
    /// No memory for a run of `pages` pages: the kernel refused it, or a limit of the source.
    #[error("no memory for a run of {pages} pages")]
    Commit {
        /// How many pages were asked for.
        pages: usize,
    },
    /// The pages could not be discarded.
    #[error("could not return pages to the kernel")]
    Discard,
}

/// A run of whole pages inside a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The first byte, aligned to [`PAGE_SIZE`].
    pub start: NonNull<u8>,
    /// How many pages.
    pub pages: usize,
}

/// Reserves address space for a pool, and commits and discards its pages.
///
/// A pool makes no system call itself. It calls [`reserve`](PageSource::reserve) once, when it is
/// made.
///
/// A source on Linux:
///
/// ```
/// use std::ptr::{NonNull, null_mut};
/// use zsmalloc::{Config, PAGE_SIZE, PageRun, PageSource, Pool, SourceError};
///
/// struct Mapping;
///
/// // SAFETY: a reservation is a private anonymous mapping, which starts as zero and stays mapped
/// // until `unreserve`.
/// unsafe impl PageSource for Mapping {
///     fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
///         let (protection, flags) = (
///             libc::PROT_READ | libc::PROT_WRITE,
///             libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
///         );
///         // SAFETY: a new mapping replaces nothing.
///         let start = unsafe { libc::mmap(null_mut(), pages * PAGE_SIZE, protection, flags, -1, 0) };
///         if start == libc::MAP_FAILED {
///             return Err(SourceError::Reserve { pages });
///         }
///         NonNull::new(start.cast()).ok_or(SourceError::Reserve { pages })
///     }
///
///     unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
///         // SAFETY: the range is a mapping of `reserve` that the caller no longer uses.
///         unsafe { libc::munmap(base.as_ptr().cast(), pages * PAGE_SIZE) };
///     }
///
///     unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
///         for run in runs {
///             let (start, length) = (run.start.as_ptr().cast(), run.pages * PAGE_SIZE);
///             // SAFETY: the run lies in a mapping of `reserve`, and its contents are unused.
///             if unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) } != 0 {
///                 return Err(SourceError::Discard);
///             }
///         }
///         Ok(())
///     }
/// }
///
/// let pool = Pool::new(Mapping, Config::with_capacity_pages(4096))?;
/// let word = pool.store(&[b"an object"])?;
/// pool.read(word, 9, |object| assert_eq!(object, b"an object"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
///
/// A reservation must be `pages * PAGE_SIZE` bytes of readable and writable memory, aligned to
/// [`PAGE_SIZE`], initially zero, used by the pool alone, and at the same address until it is
/// passed to [`unreserve`](PageSource::unreserve). This includes pages that were not committed, or
/// were discarded: their contents may be lost, but accesses must not fault.
pub unsafe trait PageSource: Send + Sync {
    /// Reserves `pages` contiguous pages. They should not be resident until touched.
    ///
    /// # Errors
    ///
    /// [`SourceError::Reserve`] if there is no room.
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError>;

    /// Releases a whole reservation.
    ///
    /// # Safety
    ///
    /// `base` and `pages` must be those of one earlier `reserve` of this source, and the memory
    /// must not be used any more.
    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize);

    /// Called before pages that were never used, or were discarded, are used. A source may refuse,
    /// to enforce a limit, for instance; the pool then uses none of them.
    ///
    /// # Errors
    ///
    /// [`SourceError::Commit`] if there is no memory.
    fn commit(&self, run: PageRun) -> Result<(), SourceError> {
        let _ = run;
        Ok(())
    }

    /// Pages of a huge page, if the source supports them: a power of two, 16 to 512; otherwise 0.
    /// Reservations must be aligned to huge pages then.
    fn huge_pages(&self) -> usize {
        0
    }

    /// Backs an aligned huge page of the reservation, none of which is resident, with one huge
    /// page. It counts as committed then and must read as zero or as what was discarded. It is
    /// later discarded whole or, after [`PageSource::split_huge`], in parts. Returns whether it was
    /// done; if not, because there is no huge page or a limit would be exceeded, no page of it may
    /// be resident.
    fn populate_huge(&self, run: PageRun) -> bool {
        let _ = run;
        false
    }

    /// Called before a part of a huge page is discarded for the first time; `run` is a page of it.
    /// From now on each of its pages must be freed when it is discarded.
    fn split_huge(&self, run: PageRun) {
        let _ = run;
    }

    /// Returns the memory of `runs` to the kernel; the address space stays reserved. The pages read
    /// as zero afterwards. Called without any lock held, with as many runs as the pool has, in
    /// address order, neighbours merged.
    ///
    /// # Errors
    ///
    /// [`SourceError::Discard`] if any of it could not be discarded. The pool then counts all of
    /// `runs` as resident and tries again later.
    ///
    /// # Safety
    ///
    /// The runs must lie inside one reservation of this source, and their contents must not be used
    /// any more.
    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError>;
}

/// Asked before a pool grows by a huge page: by more than the call needs that makes it grow.
pub trait HugePageLimit: Debug + Send + Sync {
    /// Reserves room for `bytes` bytes. `false` if there is none: single pages are used then.
    fn reserve(&self, bytes: usize) -> bool;

    /// Releases reserved room: the bytes count as resident now, or there was no huge page.
    fn release(&self, bytes: usize);
}

// SAFETY: the methods are those of the source behind the reference, which keeps the contract.
unsafe impl<S: PageSource> PageSource for &S {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        (**self).reserve(pages)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { (**self).unreserve(base, pages) }
    }

    fn commit(&self, run: PageRun) -> Result<(), SourceError> {
        (**self).commit(run)
    }

    fn huge_pages(&self) -> usize {
        (**self).huge_pages()
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        (**self).populate_huge(run)
    }

    fn split_huge(&self, run: PageRun) {
        (**self).split_huge(run);
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        // SAFETY: the caller's promise is the same.
        unsafe { (**self).discard(runs) }
    }
}

/// Pages from the global allocator, for tests and examples.
///
/// Discarding only zeroes the pages: their memory stays allocated.
#[derive(Debug, Default)]
pub struct HeapSource {
    blocks: Mutex<Vec<HeapBlock>>,
}

#[derive(Debug)]
struct HeapBlock {
    /// The allocation, whose pointer has the provenance to free it.
    allocation: NonNull<u8>,
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a block is a record of an allocation that the source owns; any thread may free it.
unsafe impl Send for HeapBlock {}

impl HeapSource {
    /// A source with no reservation yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn blocks(&self) -> std::sync::MutexGuard<'_, Vec<HeapBlock>> {
        self.blocks
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

// SAFETY: a reservation is a zeroed allocation that is freed in `unreserve` only; the base is
// rounded up to a page inside it, and the allocation is one page longer to make room for that.
unsafe impl PageSource for HeapSource {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        let refused = SourceError::Reserve { pages };
        // Aligned by hand: a zeroed allocation with a large alignment is zeroed by touching all of
        // it, one with a small alignment is mapped untouched.
        let bytes = pages
            .checked_add(1)
            .and_then(|pages| pages.checked_mul(PAGE_SIZE))
            .ok_or(refused)?;
        let layout = Layout::from_size_align(bytes, 16).map_err(|_| refused)?;
        // SAFETY: the layout has at least a page, so it is not empty.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(refused)?;
        let mut blocks = self.blocks();
        if blocks.try_reserve(1).is_err() {
            // SAFETY: it was allocated just now with this layout.
            unsafe { dealloc(allocation.as_ptr(), layout) };
            return Err(refused);
        }
        let offset = allocation.as_ptr().align_offset(PAGE_SIZE);
        // SAFETY: the allocation is a page longer than asked for, and the offset is below a page.
        let base = unsafe { allocation.add(offset) };
        blocks.push(HeapBlock {
            allocation,
            base,
            layout,
        });
        Ok(base)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, _pages: usize) {
        let mut blocks = self.blocks();
        let Some(position) = blocks.iter().position(|block| block.base == base) else {
            return;
        };
        let block = blocks.swap_remove(position);
        // SAFETY: the block was allocated by `reserve` with this layout, and leaves the list here,
        // so it is freed once.
        unsafe { dealloc(block.allocation.as_ptr(), block.layout) }
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        for run in runs {
            // SAFETY: the caller guarantees that the run lies in a reservation and is unused.
            unsafe { run.start.as_ptr().write_bytes(0, run.pages * PAGE_SIZE) }
        }
        Ok(())
    }
}

impl Drop for HeapSource {
    fn drop(&mut self) {
        for block in self.blocks().drain(..) {
            // SAFETY: the block was allocated by `reserve` with this layout and not freed since.
            unsafe { dealloc(block.allocation.as_ptr(), block.layout) }
        }
    }
}
