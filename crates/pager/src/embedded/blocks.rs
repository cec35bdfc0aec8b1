//! The blocks of an area in protection mode: their states, their memory, and the slots of their pages.
//!
//! The area's memory is a file in memory (memfd) that is mapped twice. The program uses the *view*,
//! where missing pages are inaccessible: a touch raises SIGSEGV. The engine uses the *alias*, where they
//! are accessible: it fills a page there before it makes the view accessible, and reads the page there
//! after it made the view inaccessible. The file has no descriptor: the program may close those that it does not know, and
//! their numbers are other files' then.
//!
//! Each boundary between accessible and inaccessible pages is one more VMA, of which a process may have
//! 65,530 (`vm.max_map_count`). So pages are paged in blocks: of 16 pages in a small area and of more in
//! a large one, so that all areas of a process have at most [`MOST_BLOCKS`].
//!
//! A block is `OUT`, in (`OLD` or `YOUNG`), or `BUSY` while one thread changes it; other threads wait.
//! Only that thread uses the slots of the block's pages, and their part of the alias.

use memfold_swap::{Page, Slot};
use memfold_sys::PAGE_SIZE;
use memfold_sys::memory::{Mapping, sealed_file};
use memfold_sys::reserve::{Reservation, dont_fork, free_shared, protect};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// The block is in the pool, or was never touched.
pub(super) const OUT: u8 = 0;
/// The block is in, and the clock hand passed it since its last fault.
pub(super) const OLD: u8 = 1;
/// The block is in.
pub(super) const YOUNG: u8 = 2;
/// One thread changes the block.
pub(super) const BUSY: u8 = 3;

/// Blocks of all areas of the process, at most: a quarter of `vm.max_map_count`. More makes smaller
/// blocks, and leaves fewer VMAs to the program.
const MOST_BLOCKS: usize = 16 << 10;
/// Blocks of one area, at most. More makes smaller blocks in it, and larger ones in later areas.
const MOST_BLOCKS_AN_AREA: usize = 4 << 10;
/// Pages of the smallest block. More makes fewer system calls and pages more that is not needed.
const SMALLEST_BLOCK: usize = 16;
/// Blocks that must fit into the limit at once, unless they are of the smallest size. One instruction
/// may access two blocks; with fewer it might never complete.
const LEAST_BLOCKS_ALLOWED: u64 = 16;

static BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// Pages in a block of a new area of `pages`, where the process may have `left` blocks more, of which
/// three quarters are kept for later areas. `None` if fewer than [`LEAST_BLOCKS_ALLOWED`] blocks fit into
/// the `allowed` pages.
fn block_pages(pages: usize, left: usize, allowed: u64) -> Option<usize> {
    let most = MOST_BLOCKS_AN_AREA.min(left / 4).max(1);
    let block = pages.div_ceil(most).next_power_of_two().max(SMALLEST_BLOCK);
    let fits = block == SMALLEST_BLOCK || block.min(pages) as u64 <= allowed / LEAST_BLOCKS_ALLOWED;
    fits.then_some(block)
}

/// The blocks of one area.
pub(super) struct Blocks {
    /// Start of the view.
    view: NonNull<u8>,
    alias: Mapping,
    pages: usize,
    block_pages: usize,
    states: Box<[AtomicU8]>,
    /// For each page its slot, or 0 if the page is resident or all zeros.
    slots: Mapping,
}

impl Blocks {
    /// Makes `mapping` a view of a new file. The limit allows `allowed` resident pages.
    ///
    /// # Errors
    /// If the kernel refuses the file or a mapping, or if blocks small enough for the limit would be
    /// more than [`MOST_BLOCKS`] in all.
    pub(super) fn new(mapping: &Reservation, allowed: u64) -> io::Result<Blocks> {
        let pages = mapping.length() / PAGE_SIZE;
        let left = MOST_BLOCKS.saturating_sub(BLOCKS.load(Ordering::Relaxed));
        let block_pages = block_pages(pages, left, allowed).ok_or_else(|| {
            io::Error::other(
                "without userfaultfd, the process would need too many VMAs (vm.max_map_count): map fewer \
                 or smaller regions, or raise the limit",
            )
        })?;
        let file = sealed_file(mapping.length())?;
        let alias = Mapping::shared_unlocked(&file, mapping.length())?;
        dont_fork(&alias)?;
        mapping.make_view(&file)?;
        let count = pages.div_ceil(block_pages);
        let slot_bytes = (pages * size_of::<AtomicU32>()).next_multiple_of(PAGE_SIZE);
        let blocks = Blocks {
            view: mapping.start(),
            alias,
            pages,
            block_pages,
            states: (0..count).map(|_| AtomicU8::new(OUT)).collect(),
            slots: Mapping::sparse(slot_bytes)?,
        };
        BLOCKS.fetch_add(count, Ordering::Relaxed);
        Ok(blocks)
    }

    pub(super) fn slots(&self) -> &[AtomicU32] {
        // SAFETY: the mapping holds a word a page, starts as zeros, is aligned and lives as long as
        // `self`; it is used only as these atomics.
        unsafe { std::slice::from_raw_parts(self.slots.start().as_ptr().cast(), self.pages) }
    }

    /// The pages of a block.
    pub(super) fn pages_of(&self, block: usize) -> Range<usize> {
        let start = block * self.block_pages;
        start..(start + self.block_pages).min(self.pages)
    }

    /// Pages in a block.
    pub(super) fn block_pages(&self) -> usize {
        self.block_pages
    }

    /// The blocks that a range of pages touches, as pages.
    pub(super) fn whole_blocks(&self, pages: Range<usize>) -> Range<usize> {
        if pages.is_empty() {
            return pages;
        }
        let end = pages.end.next_multiple_of(self.block_pages);
        pages.start / self.block_pages * self.block_pages..end.min(self.pages)
    }

    /// A page of each block that a range of pages touches.
    pub(super) fn blocks_over(&self, pages: Range<usize>) -> impl Iterator<Item = usize> {
        let first = pages.start / self.block_pages * self.block_pages;
        (first..pages.end).step_by(self.block_pages)
    }

    /// The block of a page.
    pub(super) fn block_of(&self, page: usize) -> usize {
        page / self.block_pages
    }

    /// Changes the state of a block, if it is `from`. Returns whether it was.
    pub(super) fn replace(&self, block: usize, from: u8, to: u8) -> bool {
        self.states[block]
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    pub(super) fn state(&self, block: usize) -> u8 {
        self.states[block].load(Ordering::Acquire)
    }

    /// Whether a block can be accessed.
    pub(super) fn is_in(&self, block: usize) -> bool {
        matches!(self.state(block), OLD | YOUNG)
    }

    /// Ends the busy state of a block, which the calling thread claimed.
    pub(super) fn set(&self, block: usize, to: u8) {
        self.states[block].store(to, Ordering::Release);
    }

    /// The address of a page in the alias.
    pub(super) fn alias(&self, page: usize) -> *mut Page {
        // SAFETY: pages are numbered within the mapping.
        unsafe { self.alias.start().as_ptr().add(page * PAGE_SIZE).cast() }
    }

    /// Calls `show` with each slot of the area, which no thread uses any more.
    pub(super) fn each_slot(&self, mut show: impl FnMut(Slot)) {
        for slot in self.slots() {
            match slot.load(Ordering::Relaxed) {
                0 => {}
                slot => show(Slot::from_raw(slot)),
            }
        }
    }

    /// Makes a busy block of the view accessible or inaccessible.
    pub(super) fn protect(&self, block: usize, accessible: bool) -> io::Result<()> {
        let pages = self.pages_of(block);
        // SAFETY: within the view, which is mapped: the calling thread serves a fault on it, or holds
        // the area's gate. A thread that loses access faults and waits for the block.
        unsafe {
            let start = self.view.add(pages.start * PAGE_SIZE);
            protect(start, pages.len() * PAGE_SIZE, accessible)
        }
    }

    /// Frees the file's memory, once the view is unmapped: the alias keeps the file until the slots are released.
    pub(super) fn empty(&self) {
        // SAFETY: no thread uses the region any more, and none moves its pages.
        // (If it fails, unmapping the alias frees it.)
        let _ = unsafe { self.free(0..self.pages) };
    }

    /// Frees the file's memory of a range of pages, which read as zeros then.
    ///
    /// # Safety
    /// No other thread uses the bytes: they are of a busy block that is inaccessible, or the program gives them up.
    pub(super) unsafe fn free(&self, pages: Range<usize>) -> io::Result<()> {
        // SAFETY: pages are numbered within the alias; the caller's promise.
        unsafe {
            free_shared(
                &self.alias,
                pages.start * PAGE_SIZE,
                pages.len() * PAGE_SIZE,
            )
        }
    }
}

// SAFETY: `view` is only an address, used under the states of the blocks; the rest is Send and Sync.
unsafe impl Send for Blocks {}
// SAFETY: as above.
unsafe impl Sync for Blocks {}

impl Drop for Blocks {
    fn drop(&mut self) {
        BLOCKS.fetch_sub(self.states.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_grow_with_the_area_and_stay_small_beside_the_limit() {
        let large = 1 << 30;
        assert_eq!(block_pages(100, MOST_BLOCKS, large), Some(16));
        assert_eq!(block_pages(1 << 18, MOST_BLOCKS, large), Some(64));
        // Where few are left.
        assert_eq!(block_pages(1 << 18, 16, large), Some(1 << 16));
        assert_eq!(block_pages(1 << 18, 16, 1 << 20), Some(1 << 16));
        assert_eq!(block_pages(1 << 18, 16, 1 << 19), None);
        assert_eq!(block_pages(16, 0, 64), Some(16));
        assert_eq!(block_pages(100, 0, 1 << 11), Some(128));
        assert_eq!(block_pages(100, 0, 1 << 10), None);
    }
}
