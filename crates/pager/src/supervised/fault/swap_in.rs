//! Swap-in: bringing stored pages back at a fault, the neighbours that are worth it among them.

use crate::density::{BLOCK, Density, has_ample_room};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{ClaimNumber, PageState};
use crate::supervised::fault::message::Served;
use crate::supervised::fault::primitives::{after_failure, copy, kill_program, wake};
use crate::supervised::fault::server::{SWAP_IN_WINDOW, Server};
use crate::supervised::group::Watermarks;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_swap::{Page, Slot};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Pages that a fault has claimed (`Filling`), in order. The claim owns one count of each slot.
pub struct Claim {
    pages: Vec<(VirtualPage, Slot)>,
    /// Which of them the fault was on.
    asked: usize,
    number: ClaimNumber,
}

impl Claim {
    /// Claims the page and, as the windows advise, some around it. `None` if the page is not
    /// swapped out any more.
    pub fn make(gate: &Shared<'_>, space: &AddressSpace, page: VirtualPage) -> Option<Claim> {
        let number = ClaimNumber::new(space.claims.fetch_add(1, Ordering::Relaxed));
        let take = |page: VirtualPage| {
            let entry = gate.table().entry(page);
            match entry.load() {
                state @ PageState::Swapped(slot)
                    if entry.replace(state, PageState::Filling(slot, number)) =>
                {
                    Some((page, slot))
                }
                _ => None,
            }
        };
        let asked_for = take(page)?;
        let mut advice =
            lock(&space.windows).swap_in(page, SWAP_IN_WINDOW, |block| swapped_of(gate, block));
        if advice.pages() < u64::from(SWAP_IN_WINDOW) && is_dense_with_room(gate, space, page) {
            advice = PageRange::around(page, u64::from(SWAP_IN_WINDOW));
        }
        let range = if advice.pages() > 1 {
            space.clip(page, advice)
        } else {
            advice
        };
        let mut pages: Vec<_> = (range.start.0..page.0)
            .filter_map(|number| take(VirtualPage(number)))
            .collect();
        let asked = pages.len();
        pages.push(asked_for);
        pages.extend((page.0 + 1..range.end.0).filter_map(|number| take(VirtualPage(number))));
        Some(Claim {
            pages,
            asked,
            number,
        })
    }

    /// Claims what is swapped out of a range of at most [`SWAP_IN_WINDOW`] pages, without a fault.
    pub fn of_range(space: &AddressSpace, gate: &impl Inside, range: PageRange) -> Option<Claim> {
        let number = ClaimNumber::new(space.claims.fetch_add(1, Ordering::Relaxed));
        let mut pages = Vec::new();
        gate.table().visit(range, |page, entry| {
            if let state @ PageState::Swapped(slot) = entry.load()
                && entry.replace(state, PageState::Filling(slot, number))
            {
                pages.push((page, slot));
            }
            pages.len() < SWAP_IN_WINDOW as usize
        });
        (!pages.is_empty()).then_some(Claim {
            pages,
            asked: 0,
            number,
        })
    }

    /// Pages claimed.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    fn page(&self, index: usize) -> VirtualPage {
        self.pages[index].0
    }

    fn slot(&self, index: usize) -> Slot {
        self.pages[index].1
    }

    /// The state of a page as long as it is claimed.
    fn state(&self, index: usize) -> PageState {
        PageState::Filling(self.slot(index), self.number)
    }
}

/// Whether much of the block around a page is resident, and there is room for all of it far from
/// where reclaim works.
fn is_dense_with_room(gate: &Shared<'_>, space: &AddressSpace, page: VirtualPage) -> bool {
    let resources = &space.resources;
    let limit = resources.resident_limit_bytes();
    let wanted = (BLOCK * PAGE_SIZE) as u64;
    let stop = Watermarks::of(limit).stop;
    if !has_ample_room(resources.resident_bytes(), wanted, limit, stop) {
        return false;
    }
    let mut resident = 1;
    gate.table()
        .visit(PageRange::around(page, BLOCK as u64), |_, entry| {
            resident += usize::from(matches!(entry.load(), PageState::Resident { .. }));
            true
        });
    Density::of(resident) != Density::Sparse
}

/// Which pages of a block of sixteen are swapped out, as bits.
fn swapped_of(gate: &Shared<'_>, block: PageRange) -> u16 {
    let mut swapped = 0;
    gate.table().visit(block, |page, entry| {
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
        let Ok(gate) = space.shared() else {
            // The address space is gone, and somebody may be changing its table.
            space.abandon_claims(&claim.pages, claim.number);
            return Served::Done;
        };
        let mut filling = Filling {
            space,
            gate: &gate,
            claim,
            buffer: &self.buffer,
            open: vec![true; claim.pages.len()],
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
        space.resources.defer_free(&spare);
        match failure {
            Some(errno) if !brought_in => after_failure(space, claim.page(claim.asked), errno),
            _ => Served::Done,
        }
    }

    /// Reads the claimed pages into the buffer; returns which of them can be had, those around the
    /// page that was asked for.
    fn load(&mut self, space: &AddressSpace, claim: &Claim) -> Range<usize> {
        let resources = &space.resources;
        let mut start = 0;
        for (index, ((_, slot), page)) in claim.pages.iter().zip(&mut self.buffer).enumerate() {
            let Err(error) = resources.swap.load(*slot, page, &mut self.scratch) else {
                continue;
            };
            resources.errors.fetch_add(1, Ordering::Relaxed);
            if index == claim.asked {
                kill_program(space, claim.page(index), &error);
                return 0..0;
            }
            if index > claim.asked {
                return start..index;
            }
            start = index + 1;
        }
        start..claim.pages.len()
    }
}

/// Claimed pages on their way in.
struct Filling<'a> {
    space: &'a AddressSpace,
    gate: &'a Shared<'a>,
    claim: &'a Claim,
    buffer: &'a [Page],
    /// The pages whose claim was not used yet.
    open: Vec<bool>,
    /// Slots that nobody owns a count of any more but this.
    spare: Vec<Slot>,
}

impl Filling<'_> {
    fn is_ours(&self, index: usize) -> bool {
        let entry = self.gate.table().entry(self.claim.page(index));
        entry.load() == self.claim.state(index)
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
            let first = self.claim.page(next);
            let run = (next..range.end)
                .zip(0..)
                .take_while(|(index, step)| {
                    self.claim.page(*index) == first.plus(*step) && self.is_ours(*index)
                })
                .count();
            let source = &self.buffer.as_flattened()[next * PAGE_SIZE..];
            let result = copy(self.space, first, source, run as u64);
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
        let counters = &self.space.resources.counters;
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
        let state = if index == self.claim.asked && self.space.clock.refaults_early(page) {
            PageState::HOT
        } else {
            PageState::RESIDENT
        };
        let entry = self.gate.table().entry(page);
        entry.replace(self.claim.state(index), state);
        self.close(index);
    }

    fn close(&mut self, index: usize) {
        self.open[index] = false;
        self.spare.push(self.claim.slot(index));
    }

    /// What was not brought in goes back to where it was. Returns the slots to release.
    fn finish(mut self) -> Vec<Slot> {
        for index in 0..self.open.len() {
            if !self.open[index] {
                continue;
            }
            let (page, slot) = self.claim.pages[index];
            let entry = self.gate.table().entry(page);
            if !entry.replace(self.claim.state(index), PageState::Swapped(slot)) {
                self.spare.push(slot);
            }
            // Whoever faulted on it meanwhile was told to wait for it.
            wake(self.space, page, 1);
        }
        self.spare
    }
}
