//! Swap-in: bringing stored pages back at a fault, the neighbours that are worth it among them.

use crate::address_space::AddressSpace;
use crate::fault::{Served, Server, after_failure, copy, stop_program, wake};
use crate::group::lock;
use crate::page::{PageRange, VirtualPage};
use crate::state::PageState;
use memfold_swap::{Page, Slot};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Pages brought in at once from the pool, at most.
pub const SWAP_IN_WINDOW: u32 = 16;

/// Neighbouring pages that a fault has claimed (`Filling`). The claim owns one count of each slot.
pub struct Claim {
    first: VirtualPage,
    slots: Vec<Slot>,
    /// Which of them the fault was on.
    asked: usize,
}

impl Claim {
    /// Claims the page and, as the windows advise, some around it. `None` if the page is not
    /// swapped out any more. The gate is held shared.
    pub fn make(space: &AddressSpace, page: VirtualPage) -> Option<Claim> {
        let take = |page: VirtualPage| {
            let entry = space.table.entry(page);
            match entry.load() {
                state @ PageState::Swapped(slot)
                    if entry.replace(state, PageState::Filling(slot)) =>
                {
                    Some(slot)
                }
                _ => None,
            }
        };
        let asked_slot = take(page)?;
        let advice =
            lock(&space.windows).swap_in(page, SWAP_IN_WINDOW, |block| swapped_of(space, block));
        let range = if advice.pages() > 1 {
            space.clip(page, advice)
        } else {
            advice
        };
        let mut slots: Vec<Slot> = (range.start.0..page.0)
            .rev()
            .map_while(|number| take(VirtualPage(number)))
            .collect();
        slots.reverse();
        let asked = slots.len();
        slots.push(asked_slot);
        slots.extend((page.0 + 1..range.end.0).map_while(|number| take(VirtualPage(number))));
        Some(Claim {
            first: VirtualPage(page.0 - asked as u64),
            slots,
            asked,
        })
    }

    fn page(&self, index: usize) -> VirtualPage {
        self.first.plus(index as u64)
    }
}

/// Which pages of a block of sixteen are swapped out, as bits.
fn swapped_of(space: &AddressSpace, block: PageRange) -> u16 {
    let mut swapped = 0;
    space.table.visit(block, |page, entry| {
        if matches!(entry.load(), PageState::Swapped(_)) {
            swapped |= 1 << (page.0 - block.start.0);
        }
        true
    });
    swapped
}

impl Server {
    /// Loads claimed pages and copies them in.
    pub fn swap_in(&mut self, space: &AddressSpace, claim: &Claim) -> Served {
        let loaded = self.load(space, claim);
        // Without the gate the address space is gone, and the claims go with its table.
        let Ok(gate) = space.shared() else {
            return Served::Done;
        };
        let mut filling = Filling {
            space,
            claim,
            buffer: &self.buffer,
            open: vec![true; claim.slots.len()],
            spare: Vec::new(),
        };
        let mut failure = filling.copy(loaded.clone());
        let alone = claim.asked..claim.asked + 1;
        // A window may cross into another mapping: the page itself may still do.
        if failure == Some(Errno::ENOENT) && filling.open[claim.asked] && loaded != alone {
            failure = filling.copy(alone);
        }
        let brought_in = !filling.open[claim.asked];
        let spare = filling.finish();
        drop(gate);
        space.group().release_soon(&spare);
        match failure {
            Some(errno) if !brought_in => after_failure(space, claim.page(claim.asked), errno),
            _ => Served::Done,
        }
    }

    /// Reads the claimed pages into the buffer; returns which of them can be had, those around the
    /// page that was asked for.
    fn load(&mut self, space: &AddressSpace, claim: &Claim) -> Range<usize> {
        let group = space.group();
        let mut start = 0;
        for (index, (slot, page)) in claim.slots.iter().zip(&mut self.buffer).enumerate() {
            let Err(error) = group.swap.load(*slot, page, &mut self.scratch) else {
                continue;
            };
            group.counters.errors.fetch_add(1, Ordering::Relaxed);
            if index == claim.asked {
                stop_program(space, claim.page(index), &error);
                return 0..0;
            }
            if index > claim.asked {
                return start..index;
            }
            start = index + 1;
        }
        start..claim.slots.len()
    }
}

/// Claimed pages on their way in. The gate is held shared.
struct Filling<'a> {
    space: &'a AddressSpace,
    claim: &'a Claim,
    buffer: &'a [Page],
    /// The pages whose claim was not used yet.
    open: Vec<bool>,
    /// Slots that nobody owns a count of any more but this.
    spare: Vec<Slot>,
}

impl Filling<'_> {
    fn is_ours(&self, index: usize) -> bool {
        let entry = self.space.table.entry(self.claim.page(index));
        entry.load() == PageState::Filling(self.claim.slots[index])
    }

    /// Copies in what is still claimed of a range of indices; stops at what cannot be helped here.
    fn copy(&mut self, range: Range<usize>) -> Option<Errno> {
        let mut next = range.start;
        while next < range.end {
            if !self.is_ours(next) {
                // An event took the page away; its count is left to us.
                self.close(next);
                wake(self.space, self.claim.page(next), 1);
                next += 1;
                continue;
            }
            let run = (next..range.end)
                .take_while(|index| self.is_ours(*index))
                .count();
            let source = &self.buffer.as_flattened()[next * PAGE_SIZE..];
            let result = copy(self.space, self.claim.page(next), source, run as u64);
            let (done, errno) = match result {
                Ok(()) => (run, None),
                Err(Partial { done, errno }) => (done as usize / PAGE_SIZE, Some(errno)),
            };
            self.arrived(next..next + done);
            next += done;
            match errno {
                None => {}
                Some(Errno::EEXIST) => {
                    // The program has a page there after all: that one is the newer.
                    self.settle(next);
                    wake(self.space, self.claim.page(next), 1);
                    next += 1;
                }
                // A partial copy does not tell why it stopped: the next try does.
                Some(Errno::EAGAIN) if done > 0 => {}
                Some(errno) => return Some(errno),
            }
        }
        None
    }

    fn arrived(&mut self, pages: Range<usize>) {
        self.space.add_resident_pages(pages.len() as i64);
        let counters = &self.space.group().counters;
        counters
            .pages_in
            .fetch_add(pages.len() as u64, Ordering::Relaxed);
        if pages.contains(&self.claim.asked) {
            counters.faults_swap_in.fetch_add(1, Ordering::Relaxed);
        }
        pages.for_each(|index| self.settle(index));
    }

    /// The program has the page.
    fn settle(&mut self, index: usize) {
        let page = self.claim.page(index);
        let state = if index == self.claim.asked && self.space.left_lately(page) {
            PageState::HOT
        } else {
            PageState::RESIDENT
        };
        let entry = self.space.table.entry(page);
        entry.replace(PageState::Filling(self.claim.slots[index]), state);
        self.close(index);
    }

    fn close(&mut self, index: usize) {
        self.open[index] = false;
        self.spare.push(self.claim.slots[index]);
    }

    /// What was not brought in goes back to where it was. Returns the slots to release.
    fn finish(mut self) -> Vec<Slot> {
        for index in 0..self.open.len() {
            if !self.open[index] {
                continue;
            }
            let (page, slot) = (self.claim.page(index), self.claim.slots[index]);
            let entry = self.space.table.entry(page);
            if !entry.replace(PageState::Filling(slot), PageState::Swapped(slot)) {
                self.spare.push(slot);
            }
            // Whoever faulted on it meanwhile was told to wait for it.
            wake(self.space, page, 1);
        }
        self.spare
    }
}
