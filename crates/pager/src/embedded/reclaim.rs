//! Page-out: background reclaim by a thread, and direct reclaim by threads that fault at the limit.

use super::area::Area;
use super::backoff::pause;
use super::config::Mode;
use super::engine_state::EngineState;
use super::limits::BATCH;
use super::mover::Mover;
use super::stats::count;
use super::victims::{Young, claim};
use super::worker::{self, Worker};
use crate::page_state::PageState;
use crate::page_state::StageIndex;
use crate::sync::lock;
use memfold_swap::{Page, SlotRanges};
use memfold_sys::futex;
use memfold_sys::memory::{discard, lock_as};
use memfold_sys::signal::block_all;
use memfold_sys::{Errno, PAGE_SIZE};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// On whose behalf pages are moved out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Initiator {
    /// Reclaim, to keep the limit: pages that do not compress are put back.
    Reclaim,
    /// The program, which called `page_out`: all pages are moved out.
    Program,
}

/// Cold ranges that are remembered, at most; further ones are ignored. More takes more memory.
const COLD_RANGES: usize = 1024;

impl EngineState {
    /// The address of a place of the stage.
    pub(super) fn place(&self, place: StageIndex) -> *const u8 {
        // SAFETY: places are numbered within the stage.
        unsafe {
            self.stage
                .start()
                .as_ptr()
                .add(place.0 as usize * PAGE_SIZE)
        }
    }

    /// Moves one batch of pages out. Returns how many pages were freed.
    pub(super) fn reclaim_batch(&self, worker: &mut Worker) -> u64 {
        if self.mode == Mode::Protection {
            return self.reclaim_block(worker);
        }
        let Some((area, _held)) = self.choose_victims(worker) else {
            return 0;
        };
        self.page_out_victims(&area, Initiator::Reclaim, worker)
    }

    /// Moves one block out, in protection mode.
    fn reclaim_block(&self, worker: &mut Worker) -> u64 {
        while let Some((area, range)) = self.next_cold_block() {
            let Some(blocks) = &area.blocks else {
                continue;
            };
            let how = (Young::Taken, Initiator::Reclaim);
            let (_, out) = self.sweep_blocks(&area, blocks, range, how, worker);
            if out > 0 {
                return out;
            }
        }
        let count = self
            .areas
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len();
        for _ in 0..2 * count + 3 {
            let (area, index, page) = {
                let mut hand = lock(&self.hand);
                let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
                match areas.get(hand.area) {
                    Some(area) => (area.clone(), hand.area, hand.page.min(area.pages)),
                    None => {
                        (hand.area, hand.page) = (0, 0);
                        continue;
                    }
                }
            };
            let Some(blocks) = &area.blocks else {
                continue;
            };
            let how = (Young::Spared, Initiator::Reclaim);
            let (next, out) = self.sweep_blocks(&area, blocks, page..area.pages, how, worker);
            let mut hand = lock(&self.hand);
            // Another thread may have moved the hand meanwhile: either position is good.
            (hand.area, hand.page) = if next >= area.pages {
                (index + 1, 0)
            } else {
                (index, next)
            };
            drop(hand);
            if out > 0 {
                return out;
            }
        }
        0
    }

    /// Takes the next block that the program marked cold from the list. What is left of its range stays there.
    fn next_cold_block(&self) -> Option<(Arc<Area>, Range<usize>)> {
        let mut hand = lock(&self.hand);
        let (area, range) = hand.cold.front_mut()?;
        let end = match &area.blocks {
            Some(blocks) => blocks.pages_of(blocks.block_of(range.start)).end,
            None => range.end,
        };
        let next = (area.clone(), range.start..end.min(range.end));
        range.start = next.1.end;
        if range.start >= range.end {
            hand.cold.pop_front();
        }
        Some(next)
    }

    /// Moves the pages of a range out, young ones included. Returns how many pages were freed. Between batches the
    /// program's signals arrive, and other threads have the worker.
    pub(super) fn page_out_range(&self, area: &Area, range: Range<usize>) -> u64 {
        let mut next = range.start;
        let mut out = 0;
        while next < range.end {
            if area.blocks.is_none() {
                self.wait_for_store();
            }
            let _blocked = block_all();
            if !self.ledger.owner.is_here() {
                // A handler of the program's has forked.
                break;
            }
            let mut worker = worker::take();
            let (after, left) = self.page_out_batch(area, next..range.end, &mut worker);
            next = after;
            out += left;
        }
        out
    }

    /// Moves the next pages of a range out. Returns the page to continue at and how many were freed.
    fn page_out_batch(
        &self,
        area: &Area,
        range: Range<usize>,
        worker: &mut Worker,
    ) -> (usize, u64) {
        if let Some(blocks) = &area.blocks {
            let how = (Young::Taken, Initiator::Program);
            return self.sweep_blocks(area, blocks, range, how, worker);
        }
        worker.clear_victims();
        let _held = self.account.hold_batch();
        let next = claim(area, range, (Young::Taken, BATCH), worker);
        let out = self.page_out_victims(area, Initiator::Program, worker);
        (next, out)
    }

    /// Remembers a range that is moved out before the clock hand's victims.
    pub(super) fn note_cold(&self, area: &Arc<Area>, range: Range<usize>) {
        let mut hand = lock(&self.hand);
        if hand.cold.len() < COLD_RANGES {
            hand.cold.push_back((area.clone(), range));
        }
    }

    fn page_out_victims(&self, area: &Area, initiator: Initiator, worker: &mut Worker) -> u64 {
        if worker.victims.is_empty() {
            return 0;
        }
        self.move_victims(area, worker);
        let out = self.store_staged(area, initiator, worker);
        self.drop_staged(area, worker);
        self.account.moved_out(out, || self.other_bytes());
        count(&self.counters.pages_out, out);
        out
    }

    /// Moves the victims to the worker's part of the stage. Pages that cannot be moved become resident
    /// again.
    fn move_victims(&self, area: &Area, worker: &mut Worker) {
        let entries = area.entries();
        let Some(_mapped) = area.mapped() else {
            // Unmapped: the pages are freed, and no longer counted.
            for (index, page) in worker.victims.iter().enumerate() {
                entries[*page].replace(PageState::Moving(worker.place(index)), PageState::Hole);
            }
            worker.victims.clear();
            return;
        };
        let (mut start, mut is_locked_alike) = (0, false);
        while start < worker.victims.len() {
            let first = worker.victims[start];
            let run = worker.victims[start..]
                .iter()
                .enumerate()
                .take_while(|(offset, page)| **page == first + offset)
                .count();
            let place = NonNull::new(self.place(worker.place(start)).cast_mut());
            let source = NonNull::new(area.address(first) as *mut u8);
            let (Some(place), Some(source)) = (place, source) else {
                unreachable!("neither stage nor regions lie at address 0");
            };
            // SAFETY: pages of a region that is mapped while its gate is held, and places of the worker's part
            // of the stage, to which there is no reference: no page is staged or returning there any more. The
            // engine's userfaultfd asks for no events.
            let moved = unsafe { self.mover().move_run(self.uffd(), place, source, run) };
            let (pages, failed) = match moved {
                Ok(()) => (run, None),
                Err(partial) => (
                    (partial.done / PAGE_SIZE as u64) as usize,
                    Some(partial.errno),
                ),
            };
            if self.mover() == Mover::Remap {
                count(&self.counters.pages_remapped, pages as u64);
            }
            for index in start..start + pages {
                let place = worker.place(index);
                let entry = &entries[worker.victims[index]];
                entry.replace(PageState::Moving(place), PageState::Staged(place));
                area.note_absent(worker.victims[index]);
            }
            start += pages;
            if failed == Some(Errno::EINVAL) && !is_locked_alike {
                // By the program, since (`mlockall`): the one before the other was mapped, or after.
                is_locked_alike = true;
                // SAFETY: the stage, and pages of a region that is mapped while its gate is held.
                let locked = unsafe { lock_as(self.whole_stage(), (source, PAGE_SIZE)) };
                if locked.is_ok() {
                    continue;
                }
            }
            if let Some(errno) = failed
                && errno != Errno::EAGAIN
            {
                self.not_moved(area, start, errno, worker);
                start += 1;
            }
        }
    }

    fn whole_stage(&self) -> (NonNull<u8>, usize) {
        (self.stage.start(), self.stage.length())
    }

    /// A victim could not be moved.
    fn not_moved(&self, area: &Area, index: usize, errno: Errno, worker: &Worker) {
        let page = worker.victims[index];
        let place = worker.place(index);
        let to = if errno == Errno::ENOENT {
            // The program dropped the page by its own madvise.
            area.note_absent(page);
            self.account.release(1);
            PageState::Hole
        } else {
            // Pinned by the kernel (GUP), for instance: skipped twice before the next attempt.
            PageState::FRESH
        };
        area.entries()[page].replace(PageState::Moving(place), to);
    }

    /// Stores the pages in the worker's part of the stage. Returns how many were freed.
    fn store_staged(&self, area: &Area, initiator: Initiator, worker: &mut Worker) -> u64 {
        let entries = area.entries();
        let mut staged: Vec<usize> = Vec::with_capacity(BATCH);
        let mut pages: Vec<&Page> = Vec::with_capacity(BATCH);
        for index in 0..worker.victims.len() {
            let place = worker.place(index);
            if entries[worker.victims[index]].load() == PageState::Staged(place) {
                staged.push(index);
                // SAFETY: staged pages are present until `drop_staged`, and nothing writes to the stage;
                // any bytes make a page.
                pages.push(unsafe { &*self.place(place).cast::<Page>() });
            }
        }
        let mut slots = Vec::with_capacity(BATCH);
        self.space
            .store_batch(&pages, &mut worker.scratch, &mut slots);
        let (mut out, mut refused) = (0, 0);
        for (index, slot) in staged.into_iter().zip(slots) {
            let place = worker.place(index);
            let page = worker.victims[index];
            let entry = &entries[page];
            let pays = |slot| {
                initiator == Initiator::Program
                    || self.compression.pays(|| self.space.stored_bytes(slot))
            };
            match slot {
                Ok(slot) if !pays(slot) => {
                    self.space.release(slot);
                    refused += 1;
                    self.putback(area, page, place);
                }
                Ok(slot)
                    if entry.replace(
                        PageState::Staged(place),
                        PageState::Swapped(slot, self.shadow_of(worker, index)),
                    ) =>
                {
                    self.note_evicted(worker, index);
                    out += 1;
                }
                // A fault brought the page back meanwhile.
                Ok(slot) => self.space.release(slot),
                Err(_) => {
                    count(&self.counters.store_failures, 1);
                    self.putback(area, page, place);
                }
            }
        }
        self.note_gain(out, refused);
        out as u64
    }

    /// Puts a page back that cannot be stored or does not compress, if it is still staged and its area
    /// still mapped.
    fn putback(&self, area: &Area, page: usize, place: StageIndex) {
        let entry = &area.entries()[page];
        let returning = PageState::Returning(place);
        if !entry.replace(PageState::Staged(place), returning) {
            return;
        }
        if let Some(_mapped) = area.mapped() {
            self.return_from_stage(area, page, place, PageState::HOT);
        } else {
            entry.replace(returning, PageState::Hole);
            self.account.release(1);
        }
    }

    /// Drops the worker's part of the stage, once no thread copies from it.
    fn drop_staged(&self, area: &Area, worker: &Worker) {
        let entries = area.entries();
        for (index, page) in worker.victims.iter().enumerate() {
            let returning = PageState::Returning(worker.place(index));
            let mut attempt = 0;
            while entries[*page].load() == returning {
                pause(attempt);
                attempt += 1;
            }
        }
        let Some(start) = NonNull::new(self.place(worker.place(0)).cast_mut()) else {
            return;
        };
        // SAFETY: the worker's part of the stage, of which no page is staged or returning any more.
        // (If it fails, the next UFFDIO_MOVE to these places fails with EEXIST, and a copy replaces them.)
        let _ = unsafe { discard(start, worker.victims.len() * PAGE_SIZE) };
    }

    /// Releases the slots of unmapped areas. Returns whether some areas are still in use by another
    /// thread, and left for later.
    fn release_unmapped(&self) -> bool {
        let dead = std::mem::take(&mut *lock(&self.pending_release));
        if dead.is_empty() {
            return false;
        }
        let mut left = Vec::new();
        let mut released = 0;
        for area in dead {
            if Arc::strong_count(&area) == 1 {
                // Acquire, for the count is read relaxed: what the last other holder wrote to the states is seen.
                fence(Ordering::Acquire);
                self.release_area(&area);
                released += 1;
            } else {
                left.push(area);
            }
        }
        let again = !left.is_empty();
        lock(&self.pending_release).extend(left);
        // Before waiters wake and read the statistics.
        self.refresh_account();
        if released > 0 && self.unreleased.fetch_sub(released, Ordering::Release) == released {
            futex::wake_all(&self.unreleased);
        }
        again
    }

    fn release_area(&self, area: &Area) {
        let mut slots = SlotRanges::new();
        area.each_slot(|slot| slots.push(slot));
        self.space.release_ranges(slots.as_slice());
        self.ledger.remove_state_bytes(area.state_bytes());
    }

    /// The reclaim thread, until the engine is dropped.
    pub(super) fn reclaim_thread(&self) {
        loop {
            // Read first: areas that were unmapped before the engine was dropped are released below.
            let stopping = self.is_stopping();
            let mut again = self.release_unmapped();
            self.release_deferred();
            if stopping && !again {
                return;
            }
            let mut fruitless = false;
            // A relaxation of the limit may have expired.
            self.refresh_account();
            if self.account.is_below_low() {
                while !self.account.is_at_high() && !self.is_stopping() {
                    self.wait_for_store();
                    // One for each batch: a new engine may wait for each worker.
                    if self.reclaim_batch(&mut worker::take()) == 0 {
                        fruitless = true;
                        break;
                    }
                    // Faulting threads may take all room that is made here, so that this does not end.
                    if self.unreleased.load(Ordering::Relaxed) > 0 {
                        again = self.release_unmapped();
                    }
                }
            }
            let longest = Duration::from_millis(if again || fruitless { 1 } else { 1000 });
            let relief = self.account.relief_left().unwrap_or(longest);
            self.reclaim_event.wait(longest.min(relief));
        }
    }
}
