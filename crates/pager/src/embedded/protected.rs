//! Protection mode: areas for hosts without userfaultfd.
//!
//! The area's memory is a file in memory that is mapped twice. Through the *view*, which is what the
//! program uses, missing pages cannot be accessed; a touch raises SIGSEGV. Through the *alias*, which
//! only the engine knows, they can: a page is filled there before access to it is given, and read
//! there after access was taken away.
//!
//! Each border between accessible and inaccessible pages is one mapping more for the kernel, which
//! allows a process 65,530. So pages come and go in blocks, of 16 pages in a small area and of more in
//! a large one, so that all areas of a process together have no more than [`MOST_BLOCKS`].
//!
//! A block is `OUT`, `IN` (`OLD` or `YOUNG`), or `BUSY` while one thread changes it, for which others
//! wait. The slots of its pages, and what the alias shows of them, are the busy thread's alone.

use super::area::Area;
use super::engine::Shared;
use super::fault::{Cause, pause, unreadable};
use super::reclaim::Wish;
use super::stats::count;
use super::worker::{BATCH, Worker};
use memfold_swap::{Page, Slot, fill_word};
use memfold_sys::PAGE_SIZE;
use memfold_sys::memory::{Mapping, sealed_file};
use memfold_sys::reserve::{Reservation, dont_fork, protect, punch_hole};
use memfold_sys::signal::die;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

const OUT: u8 = 0;
const OLD: u8 = 1;
const YOUNG: u8 = 2;
const BUSY: u8 = 3;

/// Blocks of all areas of the process together, at most. The kernel allows four times as many
/// mappings, for everything.
const MOST_BLOCKS: usize = 16 << 10;
const MOST_BLOCKS_AN_AREA: usize = 4 << 10;
const SMALLEST_BLOCK: usize = 16;
/// So many blocks are in memory at once, at least, unless they are of the smallest.
const LEAST_BLOCKS_ALLOWED: u64 = 16;

static BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// How large the blocks of an area are, in pages, where so many are left: small ones of small areas,
/// and some are kept for others. `None` if they would be a large part of the pages allowed.
fn block_pages(pages: usize, left: usize, allowed: u64) -> Option<usize> {
    let most = MOST_BLOCKS_AN_AREA.min(left / 4).max(1);
    let block = pages.div_ceil(most).next_power_of_two().max(SMALLEST_BLOCK);
    let fits = block == SMALLEST_BLOCK || block.min(pages) as u64 <= allowed / LEAST_BLOCKS_ALLOWED;
    fits.then_some(block)
}

/// What an area of this mode has besides.
pub struct Protected {
    file: OwnedFd,
    alias: Mapping,
    pages: usize,
    block_pages: usize,
    blocks: Box<[AtomicU8]>,
    /// A slot a page, or 0 for a page that is zeros or not out.
    slots: Mapping,
}

impl Protected {
    /// Makes `mapping` a view of a new file, of which so many pages may be in memory.
    ///
    /// # Errors
    /// Among others, if the regions that there are leave no room for blocks that are small beside the
    /// limit: with a block more than that the others would go, and an access to two never end.
    pub fn new(mapping: &Reservation, allowed: u64) -> io::Result<Protected> {
        let pages = mapping.length() / PAGE_SIZE;
        let left = MOST_BLOCKS.saturating_sub(BLOCKS.load(Ordering::Relaxed));
        let block_pages = block_pages(pages, left, allowed).ok_or_else(|| {
            io::Error::other(
                "without userfaultfd there is no room for more regions of this size: let there be fewer",
            )
        })?;
        let file = sealed_file(mapping.length())?;
        let alias = Mapping::shared(&file, mapping.length())?;
        dont_fork(&alias)?;
        mapping.make_view(&file)?;
        let blocks = pages.div_ceil(block_pages);
        let slot_bytes = (pages * size_of::<AtomicU32>()).next_multiple_of(PAGE_SIZE);
        let protected = Protected {
            file,
            alias,
            pages,
            block_pages,
            blocks: (0..blocks).map(|_| AtomicU8::new(OUT)).collect(),
            slots: Mapping::anonymous(slot_bytes)?,
        };
        BLOCKS.fetch_add(blocks, Ordering::Relaxed);
        Ok(protected)
    }

    fn slots(&self) -> &[AtomicU32] {
        // SAFETY: the mapping holds a word a page, starts as zeros, is aligned and lives as long as
        // `self`; it is used only as these atomics.
        unsafe { std::slice::from_raw_parts(self.slots.start().as_ptr().cast(), self.pages) }
    }

    /// The pages of a block.
    fn pages_of(&self, block: usize) -> Range<usize> {
        let start = block * self.block_pages;
        start..(start + self.block_pages).min(self.pages)
    }

    /// Pages in a block.
    pub fn block_pages(&self) -> usize {
        self.block_pages
    }

    /// The blocks that a range of pages touches, as pages.
    pub fn whole_blocks(&self, pages: Range<usize>) -> Range<usize> {
        if pages.is_empty() {
            return pages;
        }
        let end = pages.end.next_multiple_of(self.block_pages);
        pages.start / self.block_pages * self.block_pages..end.min(self.pages)
    }

    /// A page of each block that a range of pages touches.
    pub fn blocks_over(&self, pages: Range<usize>) -> impl Iterator<Item = usize> {
        let first = pages.start / self.block_pages * self.block_pages;
        (first..pages.end).step_by(self.block_pages)
    }

    /// The block of a page.
    pub fn block_of(&self, page: usize) -> usize {
        page / self.block_pages
    }

    fn replace(&self, block: usize, from: u8, to: u8) -> bool {
        self.blocks[block]
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    fn state(&self, block: usize) -> u8 {
        self.blocks[block].load(Ordering::Acquire)
    }

    /// Whether a block can be accessed.
    pub fn is_in(&self, block: usize) -> bool {
        matches!(self.state(block), OLD | YOUNG)
    }

    fn set(&self, block: usize, to: u8) {
        self.blocks[block].store(to, Ordering::Release);
    }

    /// Makes a block busy, whatever it is, and says what it was.
    fn claim(&self, block: usize) -> u8 {
        for turn in 0.. {
            let state = self.state(block);
            if state != BUSY && self.replace(block, state, BUSY) {
                return state;
            }
            pause(turn);
        }
        unreachable!("turns do not end")
    }

    fn alias(&self, page: usize) -> *mut Page {
        // SAFETY: pages are numbered within the mapping.
        unsafe { self.alias.start().as_ptr().add(page * PAGE_SIZE).cast() }
    }

    /// Shows each slot there is, once nobody uses the area.
    pub fn each_slot(&self, mut show: impl FnMut(Slot)) {
        for slot in self.slots() {
            match slot.load(Ordering::Relaxed) {
                0 => {}
                slot => show(Slot::from_raw(slot)),
            }
        }
    }

    fn protect(&self, area: &Area, block: usize, accessible: bool) -> io::Result<()> {
        let pages = self.pages_of(block);
        let start =
            NonNull::new(area.address(pages.start) as *mut u8).expect("an area is not at zero");
        // SAFETY: in the area, which is mapped (its user is in it, or the gate is held). Who loses
        // access faults and waits for the block.
        unsafe { protect(start, pages.len() * PAGE_SIZE, accessible) }
    }

    /// Gives the file's memory back, once it is mapped nowhere but here. A child that was forked meanwhile
    /// may hold the file itself open for long.
    pub fn empty(&self) {
        // Where it fails, the memory goes with the file.
        let _ = self.punch(0..self.pages);
    }

    fn punch(&self, pages: Range<usize>) -> io::Result<()> {
        punch_hole(&self.file, pages.start * PAGE_SIZE, pages.len() * PAGE_SIZE)
    }
}

impl Drop for Protected {
    fn drop(&mut self) {
        BLOCKS.fetch_sub(self.blocks.len(), Ordering::Relaxed);
    }
}

impl Shared {
    /// Gives access to the block of a page, bringing in what is out of it. When it returns, the
    /// access can be made again.
    pub(super) fn serve_block(
        &self,
        area: &Area,
        protected: &Protected,
        page: usize,
        worker: &mut Worker,
    ) {
        let block = protected.block_of(page);
        for turn in 0.. {
            match protected.state(block) {
                OUT if protected.replace(block, OUT, BUSY) => {
                    return self.fill_block(area, protected, block, worker);
                }
                OLD | YOUNG => return,
                _ => pause(turn),
            }
        }
    }

    fn fill_block(&self, area: &Area, protected: &Protected, block: usize, worker: &mut Worker) {
        let pages = protected.pages_of(block);
        self.make_room_for_all(pages.len() as u64, worker);
        let mut brought = 0;
        let all = pages.len() as u64;
        for page in pages.clone() {
            let slot = protected.slots()[page].load(Ordering::Relaxed);
            if slot == 0 {
                continue;
            }
            // SAFETY: the block is ours, and its pages are inaccessible but through the alias.
            let out = unsafe { &mut *protected.alias(page) };
            let slot = Slot::from_raw(slot);
            if let Err(error) = self.space.load(slot, out, &mut worker.scratch) {
                unreadable(&error);
            }
            brought += 1;
        }
        if let Err(error) = protected.protect(area, block, true) {
            die(&["cannot give access to a page: ", &error.to_string()]);
        }
        for page in pages {
            area.arrived(page);
            match protected.slots()[page].swap(0, Ordering::Relaxed) {
                0 => {}
                slot => self.space.release(Slot::from_raw(slot)),
            }
        }
        protected.set(block, YOUNG);
        count(&self.counters.pages_in, brought);
        count(&self.counters.pages_zero_filled, all - brought);
        let counter = match brought {
            0 => &self.counters.faults_zero_fill,
            _ => &self.counters.faults_swap_in,
        };
        count(counter, 1);
    }

    /// Takes room for a whole block, at any cost.
    fn make_room_for_all(&self, pages: u64, worker: &mut Worker) {
        let mut taken = 0;
        while taken < pages {
            taken += self.make_room(pages - taken, Cause::Fault, worker);
        }
    }

    /// Moves the blocks of a range of pages out, but for young ones (which are young no more)
    /// unless `all`, until one left. Returns where to go on and how many pages left.
    pub(super) fn sweep_blocks(
        &self,
        area: &Area,
        protected: &Protected,
        range: Range<usize>,
        all: bool,
        worker: &mut Worker,
    ) -> (usize, u64) {
        let mut page = range.start;
        while page < range.end {
            let block = protected.block_of(page);
            let pages = protected.pages_of(block);
            page = pages.end;
            let state = protected.state(block);
            if state == YOUNG && !all {
                protected.replace(block, YOUNG, OLD);
            } else if matches!(state, OLD | YOUNG)
                && area.unless_pinned(&pages, || protected.replace(block, state, BUSY))
            {
                let wish = if all { Wish::Program } else { Wish::Reclaim };
                let out = self.page_out_block(area, protected, block, wish, worker);
                if out > 0 {
                    return (page, out);
                }
            }
        }
        (page.min(range.end), 0)
    }

    /// Moves a busy block out. It is out afterwards, or in again if it could not be stored or is not
    /// worth it.
    fn page_out_block(
        &self,
        area: &Area,
        protected: &Protected,
        block: usize,
        wish: Wish,
        worker: &mut Worker,
    ) -> u64 {
        let pages = protected.pages_of(block);
        let Some(_mapped) = area.mapped() else {
            protected.set(block, YOUNG);
            return 0;
        };
        if protected.protect(area, block, false).is_err() {
            protected.set(block, YOUNG);
            return 0;
        }
        let stored = self.store_block(protected, pages.clone(), worker);
        let pays = wish == Wish::Program || self.block_gains(protected, pages.clone());
        if !stored || !pays || protected.punch(pages.clone()).is_err() {
            self.release_slots(protected, pages.clone());
            if stored && !pays {
                self.note_gain(0, pages.len());
            } else {
                count(&self.counters.store_failures, pages.len() as u64);
            }
            if let Err(error) = protected.protect(area, block, true) {
                die(&["cannot give access to a page: ", &error.to_string()]);
            }
            protected.set(block, YOUNG);
            return 0;
        }
        let out = pages.len() as u64;
        let slots = protected.slots()[pages.clone()].iter();
        let stored = slots.filter(|slot| slot.load(Ordering::Relaxed) != 0);
        count(&self.counters.pages_out, stored.count() as u64);
        self.note_gain(pages.len(), 0);
        pages.for_each(|page| area.left(page));
        protected.set(block, OUT);
        self.account.release(out);
        self.refresh_account();
        out
    }

    /// Whether a stored block is worth to be in the pool, one page with another.
    fn block_gains(&self, protected: &Protected, pages: Range<usize>) -> bool {
        let slots = &protected.slots()[pages.clone()];
        let slots = slots.iter().map(|slot| slot.load(Ordering::Relaxed));
        let bytes = |slot| self.space.stored_bytes(Slot::from_raw(slot)).unwrap_or(0);
        let stored = slots.filter(|slot| *slot != 0).map(bytes);
        self.compression
            .pays(|| Some(stored.sum::<u64>() / pages.len() as u64))
    }

    /// Gives up what a busy block's pages have in the pool.
    fn release_slots(&self, protected: &Protected, pages: Range<usize>) {
        for slot in &protected.slots()[pages] {
            match slot.swap(0, Ordering::Relaxed) {
                0 => {}
                slot => self.space.release(Slot::from_raw(slot)),
            }
        }
    }

    /// Stores the pages of a busy block that are not zeros. `false` if any could not be.
    fn store_block(&self, protected: &Protected, pages: Range<usize>, worker: &mut Worker) -> bool {
        let mut whole = true;
        let mut numbers = Vec::with_capacity(BATCH);
        let mut slots = Vec::with_capacity(BATCH);
        let mut page = pages.start;
        while page < pages.end {
            numbers.clear();
            slots.clear();
            let mut contents: Vec<&Page> = Vec::with_capacity(BATCH);
            while page < pages.end && numbers.len() < BATCH {
                // SAFETY: the block is ours and inaccessible but through the alias, which nobody
                // writes to while it is.
                let content = unsafe { &*protected.alias(page) };
                if fill_word(content) != Some(0) {
                    numbers.push(page);
                    contents.push(content);
                }
                page += 1;
            }
            self.space
                .store_batch(&contents, &mut worker.scratch, &mut slots);
            for (number, slot) in numbers.iter().zip(&slots) {
                match slot {
                    Ok(slot) => protected.slots()[*number].store(slot.raw(), Ordering::Relaxed),
                    Err(_) => whole = false,
                }
            }
        }
        whole
    }

    /// Drops the contents of pages.
    pub(super) fn drop_in_blocks(&self, area: &Area, protected: &Protected, range: Range<usize>) {
        let Some(_mapped) = area.mapped() else {
            return;
        };
        let mut page = range.start;
        while page < range.end {
            let block = protected.block_of(page);
            let whole = protected.pages_of(block);
            let part = page..whole.end.min(range.end);
            page = part.end;
            let was = protected.claim(block);
            self.release_slots(protected, part.clone());
            let mut is = was;
            if was != OUT {
                if part == whole && protected.protect(area, block, false).is_ok() {
                    whole.clone().for_each(|page| area.left(page));
                    self.account.release(whole.len() as u64);
                    is = OUT;
                }
                if protected.punch(part.clone()).is_err() {
                    for page in part {
                        // SAFETY: in the alias; nobody else uses these bytes, says who called
                        // `discard`.
                        unsafe { (*protected.alias(page)).fill(0) };
                    }
                }
            }
            protected.set(block, is);
        }
        self.refresh_account();
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
