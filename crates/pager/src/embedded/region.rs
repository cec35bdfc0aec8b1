//! Regions: what the library exports of an area.

use super::area::{Area, FaultServer, Pins, Served};
use super::backoff::pause;
use super::config::Mode;
use super::engine::Engine;
use super::engine_state::EngineState;
use super::error::Error;
use super::fault::Cause;
use super::limits::WINDOW;
use super::remote_queue::PAUSE;
use super::stats::Stats;
use super::streams::Advice;
use super::worker;
use crate::page_state::PageState;
use memfold_sys::PAGE_SIZE;
use memfold_sys::signal::block_all;
use memfold_sys::thread::nap;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A range of addresses under an engine's limit, unmapped on drop. Starts as zeros. All methods may
/// be called from any thread.
///
/// In a forked child the addresses are unmapped, and methods that need the engine fail or do
/// nothing.
pub struct Region {
    area: Arc<Area>,
    length: usize,
    /// Keeps the engine's threads running.
    engine: Arc<Engine>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").finish_non_exhaustive()
    }
}

impl Engine {
    /// Maps a region of `length` bytes.
    ///
    /// # Errors
    /// If the length is zero or the kernel has no such range of addresses.
    pub fn map(self: &Arc<Self>, length: usize) -> Result<Region, Error> {
        Ok(Region {
            area: self.state().map(length)?,
            length,
            engine: self.clone(),
        })
    }
}

impl Region {
    /// The first byte, at a multiple of 2 MiB.
    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.area.start as *mut u8).expect("a mapping is not at zero")
    }

    /// Length in bytes, as it was asked for.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The engine it belongs to.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Bytes that are resident now.
    pub fn resident_bytes(&self) -> u64 {
        self.area.resident() * PAGE_SIZE as u64
    }

    /// Whether this process was forked from the one that mapped the region.
    pub fn is_inherited(&self) -> bool {
        self.engine.is_inherited()
    }

    fn state(&self) -> &Arc<EngineState> {
        self.engine.state()
    }

    #[cfg(test)]
    pub(super) fn area(&self) -> &Arc<Area> {
        &self.area
    }

    /// Statistics of the engine.
    pub fn stats(&self) -> Stats {
        self.engine.stats()
    }

    fn check(&self, bytes: &Range<usize>) -> Result<(), Error> {
        if self.is_inherited() {
            return Err(Error::Forked);
        }
        if bytes.start > bytes.end || bytes.end > self.length {
            return Err(Error::OutOfRange {
                start: bytes.start,
                end: bytes.end,
                length: self.length,
            });
        }
        Ok(())
    }

    /// A handler of the program's may have forked between two steps of a long call.
    fn check_owner(&self) -> Result<(), Error> {
        if self.is_inherited() {
            return Err(Error::Forked);
        }
        Ok(())
    }

    /// The pages that a range of bytes touches.
    fn touching(&self, bytes: Range<usize>) -> Result<Range<usize>, Error> {
        self.check(&bytes)?;
        if bytes.is_empty() {
            return Ok(0..0);
        }
        Ok(bytes.start / PAGE_SIZE..bytes.end.div_ceil(PAGE_SIZE))
    }

    /// The pages that lie entirely within a range of bytes. The last page of the region counts as whole.
    fn within(&self, bytes: Range<usize>) -> Result<Range<usize>, Error> {
        self.check(&bytes)?;
        let end = if bytes.end == self.length {
            self.area.pages
        } else {
            bytes.end / PAGE_SIZE
        };
        let start = bytes.start.div_ceil(PAGE_SIZE);
        Ok(start..end.max(start))
    }

    /// Swaps a range in before it is touched, as far as there is room without reclaim. Pages on other machines are left
    /// there: to load one that is lost aborts the program, which may never touch it.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn prefetch(&self, bytes: Range<usize>) -> Result<(), Error> {
        let pages = self.touching(bytes)?;
        // Between windows the program's signals arrive, and other threads have the worker.
        if let Some(blocks) = &self.area.blocks {
            for first in blocks.blocks_over(pages) {
                let block_pages = blocks.block_pages() as u64;
                if !self.state().account.has_spare(block_pages) {
                    break;
                }
                let _blocked = block_all();
                self.check_owner()?;
                let mut worker = worker::take();
                self.state()
                    .serve_block(&self.area, blocks, first, &mut worker);
            }
            return Ok(());
        }
        for start in pages.clone().step_by(WINDOW) {
            let count = WINDOW.min(pages.end - start) as u32;
            let advice = Advice::run(self.area.address(start), count);
            if !self.state().account.has_spare(u64::from(advice.count)) {
                break;
            }
            let _blocked = block_all();
            self.check_owner()?;
            let mut worker = worker::take();
            self.state()
                .swap_in(&self.area, advice, Cause::Advice, &mut worker);
        }
        Ok(())
    }

    /// Marks a range as cold: reclaim moves it out first.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn mark_cold(&self, bytes: Range<usize>) -> Result<(), Error> {
        let pages = self.touching(bytes)?;
        if !pages.is_empty() {
            let _blocked = block_all();
            self.state().note_cold(&self.area, pages);
        }
        Ok(())
    }

    /// Moves a range out now, whether room is needed or not. Pages that another thread touches
    /// meanwhile, or that are pinned, stay. Returns how many bytes were moved out.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn page_out(&self, bytes: Range<usize>) -> Result<u64, Error> {
        let pages = self.touching(bytes)?;
        let out = self.state().page_out_range(&self.area, pages);
        Ok(out * PAGE_SIZE as u64)
    }

    /// Discards the contents of a range, which reads as zeros afterwards and takes no memory. Parts of
    /// pages at its ends are overwritten with zeros, and so are pages that are pinned.
    ///
    /// # Errors
    /// If the range is not in the region.
    ///
    /// # Safety
    /// No other thread accesses the range until this returns.
    pub unsafe fn discard(&self, bytes: Range<usize>) -> Result<(), Error> {
        let whole = self.within(bytes.clone())?;
        let whole_bytes = whole.start * PAGE_SIZE..(whole.end * PAGE_SIZE).min(self.length);
        if whole.is_empty() {
            // SAFETY: in the region; the caller promises that no other thread accesses it.
            unsafe { self.clear(bytes) };
            return Ok(());
        }
        // SAFETY: as above.
        unsafe {
            self.clear(bytes.start..whole_bytes.start);
            self.clear(whole_bytes.end..bytes.end);
        }
        let blocked = block_all();
        let pinned = match &self.area.blocks {
            Some(blocks) => self.state().drop_in_blocks(&self.area, blocks, whole),
            None => self.state().drop_pages(&self.area, whole),
        };
        drop(blocked);
        for pages in pinned {
            let end = (pages.end * PAGE_SIZE).min(self.length);
            // SAFETY: as above.
            unsafe { self.clear(pages.start * PAGE_SIZE..end) };
        }
        Ok(())
    }

    /// # Safety
    /// The bytes are in the region, and no other thread accesses them.
    unsafe fn clear(&self, bytes: Range<usize>) {
        if !bytes.is_empty() {
            // SAFETY: the caller's promise. (These are ordinary accesses: they may fault.)
            unsafe {
                self.start()
                    .as_ptr()
                    .add(bytes.start)
                    .write_bytes(0, bytes.len());
            }
        }
    }

    /// Swaps a range in and keeps it resident until the pin is dropped.
    ///
    /// In [`Mode::Signal`] and [`Mode::Protection`] a system call that is given a missing page fails with
    /// `EFAULT`, because the kernel's own accesses raise no signal. In any mode, pin buffers that devices
    /// access by physical address.
    ///
    /// # Errors
    /// If the range is not in the region, or the limit has no room for it.
    pub fn pin(&self, bytes: Range<usize>) -> Result<PinnedPages, Error> {
        let pages = self.area.kept_with(self.touching(bytes)?);
        let account = &self.state().account;
        let blocked = block_all();
        let is_pinned = self.area.pins().pin(&pages, |more| account.pin(more));
        drop(blocked);
        if !is_pinned {
            let pages = pages.len();
            return Err(Error::TooMuchPinned { pages });
        }
        let pin = PinnedPages {
            pins: self.area.pins().clone(),
            pages: pages.clone(),
            engine: self.engine.clone(),
        };
        for page in pages {
            if !self.state().bring_in(&self.area, page) {
                return Err(Error::Forked);
            }
        }
        Ok(pin)
    }

    /// Whether system calls may be given this region's memory without a pin.
    pub fn supports_syscalls(&self) -> bool {
        self.engine.mode() == Mode::Thread
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.state().unmap(&self.area);
    }
}

/// A range that stays resident until this is dropped.
#[must_use = "the range is pinned only until this is dropped"]
pub struct PinnedPages {
    /// Not the area, whose slots are released only once no other thread holds it.
    pins: Arc<Pins>,
    pages: Range<usize>,
    engine: Arc<Engine>,
}

impl fmt::Debug for PinnedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPages")
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        let state = self.engine.state();
        if state.ledger.owner.is_here() {
            let _blocked = block_all();
            self.pins
                .unpin(&self.pages, |fewer| state.account.unpin(fewer));
        }
    }
}

/// What became of a page that is to be dropped.
enum Dropped {
    /// It has no contents now.
    Hole,
    /// The caller drops it.
    Claimed,
    /// It stays.
    Pinned,
}

/// Adds a page to runs of pages. Returns whether it begins one.
fn add_page(runs: &mut Vec<Range<usize>>, page: usize) -> bool {
    match runs.last_mut() {
        Some(run) if run.end == page => {
            run.end += 1;
            false
        }
        _ => {
            runs.push(page..page + 1);
            true
        }
    }
}

impl EngineState {
    /// Makes a page resident, whatever its state. It stays resident only if it is pinned. Between attempts the program's
    /// signals arrive. `false` if a handler of these has forked, and this is the child.
    fn bring_in(&self, area: &Arc<Area>, page: usize) -> bool {
        if let Some(blocks) = &area.blocks {
            while !blocks.is_in(blocks.block_of(page)) {
                let _blocked = block_all();
                if !self.ledger.owner.is_here() {
                    return false;
                }
                self.serve_block(area, blocks, page, &mut worker::take());
            }
            return true;
        }
        while !matches!(area.entries()[page].load(), PageState::Resident { .. }) {
            let blocked = block_all();
            if !self.ledger.owner.is_here() {
                return false;
            }
            // Not held while waiting: the thread that brings the page in needs one, too.
            let mut worker = worker::take();
            // No thread has this number: the access does not disturb the streams of faults.
            let served = self.serve(area, area.address(page), usize::MAX, &mut worker);
            drop(worker);
            drop(blocked);
            if served != Served::Done {
                nap(PAUSE);
            }
        }
        true
    }

    /// Drops the contents of pages. Returns those that it leaves, as they are pinned.
    fn drop_pages(&self, area: &Area, pages: Range<usize>) -> Vec<Range<usize>> {
        let (mut dropping, mut pinned) = (Vec::new(), Vec::new());
        let Some(_mapped) = area.mapped() else {
            return pinned;
        };
        let mut slots = memfold_swap::SlotRanges::new();
        for page in pages {
            match Self::drop_state(area, page, |slot| slots.push(slot)) {
                Dropped::Hole => {}
                Dropped::Pinned => {
                    add_page(&mut pinned, page);
                }
                Dropped::Claimed => {
                    // No longer claimed than until the next run begins.
                    if add_page(&mut dropping, page) && dropping.len() > 1 {
                        self.drop_run(area, dropping.swap_remove(0));
                    }
                }
            }
        }
        if let Some(run) = dropping.pop() {
            self.drop_run(area, run);
        }
        self.space.release_ranges(slots.as_slice());
        self.refresh_account();
        pinned
    }

    /// Makes a page that is not resident a hole. Claims a resident page that is not pinned, to be dropped by the caller.
    fn drop_state(
        area: &Area,
        page: usize,
        mut slot_of: impl FnMut(memfold_swap::Slot),
    ) -> Dropped {
        let entry = &area.entries()[page];
        for attempt in 0.. {
            let state = entry.load();
            match state {
                PageState::Hole => return Dropped::Hole,
                PageState::Swapped(slot, _) => {
                    if entry.replace(state, PageState::Hole) {
                        slot_of(slot);
                        return Dropped::Hole;
                    }
                }
                PageState::Resident { .. } | PageState::Removed(_) => {
                    let claim = || entry.replace(state, PageState::Clearing);
                    match area.unless_pinned(&(page..page + 1), claim) {
                        Some(true) => return Dropped::Claimed,
                        Some(false) => {}
                        None => return Dropped::Pinned,
                    }
                }
                _ => pause(attempt),
            }
        }
        unreachable!("attempts have no end")
    }

    /// Drops a run of claimed resident pages.
    fn drop_run(&self, area: &Area, run: Range<usize>) {
        let start = NonNull::new(area.address(run.start) as *mut u8);
        if let Some(start) = start {
            // SAFETY: in the area, which is mapped while the caller holds its gate; the caller of
            // `discard` gives up the contents.
            let _ = unsafe { memfold_sys::memory::discard(start, run.len() * PAGE_SIZE) };
        }
        for page in run.clone() {
            area.note_absent(page);
            area.entries()[page].replace(PageState::Clearing, PageState::Hole);
        }
        self.account.release(run.len() as u64);
    }
}
