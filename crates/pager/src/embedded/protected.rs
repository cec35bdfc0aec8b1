//! Protection mode: faults and reclaim on hosts without userfaultfd, in [blocks](super::blocks).

use super::area::Area;
use super::backoff::pause;
use super::blocks::{BUSY, Blocks, OLD, OUT, YOUNG};
use super::engine_state::EngineState;
use super::fault::{Cause, unreadable};
use super::limits::BATCH;
use super::reclaim::Initiator;
use super::stats::count;
use super::victims::Young;
use super::worker::Worker;
use memfold_swap::{Page, Slot, fill_word};
use memfold_sys::signal::die;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl EngineState {
    /// Makes the block of a page accessible, after swapping it in. The access can be repeated then.
    pub(super) fn serve_block(
        &self,
        area: &Area,
        blocks: &Blocks,
        page: usize,
        worker: &mut Worker,
    ) {
        let block = blocks.block_of(page);
        for attempt in 0.. {
            match blocks.state(block) {
                OUT if blocks.replace(block, OUT, BUSY) => {
                    return self.fill_block(area, blocks, block, worker);
                }
                OLD | YOUNG => return,
                _ => pause(attempt),
            }
        }
    }

    fn fill_block(&self, area: &Area, blocks: &Blocks, block: usize, worker: &mut Worker) {
        let pages = blocks.pages_of(block);
        self.make_room_for_all(pages.len() as u64, worker);
        let mut brought = 0;
        let all = pages.len() as u64;
        for page in pages.clone() {
            let slot = blocks.slots()[page].load(Ordering::Relaxed);
            if slot == 0 {
                continue;
            }
            // SAFETY: this thread made the block busy; its pages are accessible through the alias only.
            let out = unsafe { &mut *blocks.alias(page) };
            let slot = Slot::from_raw(slot);
            if let Err(error) = self.space.load(slot, out, &mut worker.scratch) {
                unreadable(&error);
            }
            brought += 1;
        }
        if let Err(error) = blocks.protect(block, true) {
            die(&[
                "cannot make pages of a region accessible (mprotect): ",
                &error.to_string(),
            ]);
        }
        for page in pages {
            area.note_resident(page);
            match blocks.slots()[page].swap(0, Ordering::Relaxed) {
                0 => {}
                slot => self.space.release(Slot::from_raw(slot)),
            }
        }
        blocks.set(block, YOUNG);
        count(&self.counters.pages_in, brought);
        count(&self.counters.pages_zero_filled, all - brought);
        let counter = match brought {
            0 => &self.counters.faults_zero_fill,
            _ => &self.counters.faults_swap_in,
        };
        count(counter, 1);
    }

    /// Reserves room for a whole block, by direct reclaim if need be.
    fn make_room_for_all(&self, pages: u64, worker: &mut Worker) {
        let mut taken = 0;
        while taken < pages {
            taken += self.make_room(pages - taken, Cause::Fault, worker);
        }
    }

    /// Moves the next block of a range of pages out. Young blocks are taken too, or skipped and made old
    /// (second chance). Returns the page to continue at and how many pages were moved out.
    pub(super) fn sweep_blocks(
        &self,
        area: &Area,
        blocks: &Blocks,
        range: Range<usize>,
        (young, initiator): (Young, Initiator),
        worker: &mut Worker,
    ) -> (usize, u64) {
        let mut page = range.start;
        while page < range.end {
            let block = blocks.block_of(page);
            let pages = blocks.pages_of(block);
            page = pages.end;
            let state = blocks.state(block);
            if state == YOUNG && young == Young::Spared {
                blocks.replace(block, YOUNG, OLD);
            } else if matches!(state, OLD | YOUNG) {
                let _held = self.account.hold_batch();
                if area.unless_pinned(&pages, || blocks.replace(block, state, BUSY)) != Some(true) {
                    continue;
                }
                let out = self.page_out_block(area, blocks, block, initiator, worker);
                if out > 0 {
                    return (page, out);
                }
            }
        }
        (page.min(range.end), 0)
    }

    /// Moves a busy block out. It stays in if it cannot be stored or does not compress.
    fn page_out_block(
        &self,
        area: &Area,
        blocks: &Blocks,
        block: usize,
        initiator: Initiator,
        worker: &mut Worker,
    ) -> u64 {
        let pages = blocks.pages_of(block);
        let Some(_mapped) = area.mapped() else {
            blocks.set(block, YOUNG);
            return 0;
        };
        if blocks.protect(block, false).is_err() {
            blocks.set(block, YOUNG);
            return 0;
        }
        let stored = self.store_block(blocks, pages.clone(), worker);
        let pays = initiator == Initiator::Program || self.block_gains(blocks, pages.clone());
        // SAFETY: this thread made the block busy and inaccessible.
        let freed = || unsafe { blocks.free(pages.clone()) }.is_ok();
        if !stored || !pays || !freed() {
            self.release_slots(blocks, pages.clone());
            if stored && !pays {
                self.note_gain(0, pages.len());
            } else {
                count(&self.counters.store_failures, pages.len() as u64);
            }
            if let Err(error) = blocks.protect(block, true) {
                die(&[
                    "cannot make pages of a region accessible (mprotect): ",
                    &error.to_string(),
                ]);
            }
            blocks.set(block, YOUNG);
            return 0;
        }
        let out = pages.len() as u64;
        let slots = blocks.slots()[pages.clone()].iter();
        let stored = slots.filter(|slot| slot.load(Ordering::Relaxed) != 0);
        count(&self.counters.pages_out, stored.count() as u64);
        self.note_gain(pages.len(), 0);
        pages.for_each(|page| area.note_absent(page));
        blocks.set(block, OUT);
        self.account.moved_out(out, || self.other_bytes());
        out
    }

    /// Whether keeping a stored block in the pool saves memory, on average over its pages.
    fn block_gains(&self, blocks: &Blocks, pages: Range<usize>) -> bool {
        let slots = &blocks.slots()[pages.clone()];
        let slots = slots.iter().map(|slot| slot.load(Ordering::Relaxed));
        let bytes = |slot| self.space.stored_bytes(Slot::from_raw(slot)).unwrap_or(0);
        let stored = slots.filter(|slot| *slot != 0).map(bytes);
        self.compression
            .pays(|| Some(stored.sum::<u64>() / pages.len() as u64))
    }

    /// Releases the slots of a busy block's pages.
    fn release_slots(&self, blocks: &Blocks, pages: Range<usize>) {
        for slot in &blocks.slots()[pages] {
            match slot.swap(0, Ordering::Relaxed) {
                0 => {}
                slot => self.space.release(Slot::from_raw(slot)),
            }
        }
    }

    /// Stores the pages of a busy block, except all-zero ones. Returns `false` if any page was refused.
    fn store_block(&self, blocks: &Blocks, pages: Range<usize>, worker: &mut Worker) -> bool {
        let mut whole = true;
        let mut numbers = Vec::with_capacity(BATCH);
        let mut slots = Vec::with_capacity(BATCH);
        let mut page = pages.start;
        while page < pages.end {
            numbers.clear();
            slots.clear();
            let mut contents: Vec<&Page> = Vec::with_capacity(BATCH);
            while page < pages.end && numbers.len() < BATCH {
                // SAFETY: this thread made the block busy, and it is accessible through the alias only,
                // which only this thread writes to meanwhile.
                let content = unsafe { &*blocks.alias(page) };
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
                    Ok(slot) => blocks.slots()[*number].store(slot.into_raw(), Ordering::Relaxed),
                    Err(_) => whole = false,
                }
            }
        }
        whole
    }

    /// Drops the contents of pages. Returns those that it leaves, as their block is pinned.
    pub(super) fn drop_in_blocks(
        &self,
        area: &Area,
        blocks: &Blocks,
        range: Range<usize>,
    ) -> Vec<Range<usize>> {
        let mut pinned = Vec::new();
        let Some(_mapped) = area.mapped() else {
            return pinned;
        };
        let mut page = range.start;
        while page < range.end {
            let block = blocks.block_of(page);
            let whole = blocks.pages_of(block);
            let part = page..whole.end.min(range.end);
            page = part.end;
            let Some(was) = claim_unless_pinned(area, blocks, block) else {
                pinned.push(part);
                continue;
            };
            self.release_slots(blocks, part.clone());
            let mut is = was;
            if was != OUT {
                if part == whole && blocks.protect(block, false).is_ok() {
                    whole.clone().for_each(|page| area.note_absent(page));
                    self.account.release(whole.len() as u64);
                    is = OUT;
                }
                // SAFETY: the caller of `discard` promises that no other thread uses these bytes.
                if unsafe { blocks.free(part.clone()) }.is_err() {
                    for page in part {
                        // SAFETY: in the alias; as above.
                        unsafe { (*blocks.alias(page)).fill(0) };
                    }
                }
            }
            blocks.set(block, is);
        }
        self.refresh_account();
        pinned
    }
}

/// Makes a block busy, and returns the state that it was in. `None` if it is pinned.
fn claim_unless_pinned(area: &Area, blocks: &Blocks, block: usize) -> Option<u8> {
    let pages = blocks.pages_of(block);
    for attempt in 0.. {
        let state = blocks.state(block);
        let claim = || state != BUSY && blocks.replace(block, state, BUSY);
        if area.unless_pinned(&pages, claim)? {
            return Some(state);
        }
        pause(attempt);
    }
    unreachable!("attempts have no end")
}
