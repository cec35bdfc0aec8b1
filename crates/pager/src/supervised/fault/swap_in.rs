//! Swap-in of the faulting page and its readahead window.

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
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages in state `Filling` that one fault has claimed, in order. The claim owns one reference of each
/// slot, and belongs to the thread that made it.
pub struct Claim {
    pages: Vec<(VirtualPage, Slot)>,
    /// Index of the faulting page.
    faulting: usize,
    number: ClaimNumber,
}

impl Claim {
    /// Claims the page and its readahead window. `None` if the page is no longer swapped out.
    pub fn make(gate: &Shared<'_>, space: &AddressSpace, page: VirtualPage) -> Option<Claim> {
        debug_assert!(gate.is_of(space));
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
        let faulting_page = take(page)?;
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
        let faulting = pages.len();
        pages.push(faulting_page);
        pages.extend((page.0 + 1..range.end.0).filter_map(|number| take(VirtualPage(number))));
        Some(Claim {
            pages,
            faulting,
            number,
        })
    }

    /// Claims up to [`SWAP_IN_WINDOW`] swapped-out pages of a range, without a fault.
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
            faulting: 0,
            number,
        })
    }

    /// Number of claimed pages.
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    fn page(&self, index: usize) -> VirtualPage {
        self.pages[index].0
    }

    fn slot(&self, index: usize) -> Slot {
        self.pages[index].1
    }

    /// The state that a page has while it is claimed.
    fn state(&self, index: usize) -> PageState {
        PageState::Filling(self.slot(index), self.number)
    }
}

/// Whether the block around a page is dense, and all of it fits well below the watermark at which
/// reclaim stops.
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

/// Bitmap of the swapped-out pages of a block of 16 pages.
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
    /// Loads claimed pages and copies them in. Pages on other machines, for which this thread may not
    /// wait, stay swapped out.
    pub fn swap_in(&mut self, space: &Arc<AddressSpace>, claim: &Claim) -> Served {
        let loaded = self.load(space, claim);
        let Ok(gate) = space.shared() else {
            // The address space is gone. The thread that holds the gate may be changing the table.
            space.abandon_claims(&claim.pages, claim.number);
            return Served::Done;
        };
        let mut filling = Filling {
            space,
            gate: &gate,
            claim,
            buffer: &self.buffer,
            open: vec![true; claim.pages.len()],
            released: Vec::new(),
        };
        let mut failure = filling.copy(loaded.clone());
        let alone = claim.faulting..claim.faulting + 1;
        // The window may cross into another mapping; the faulting page alone may still be copied.
        if failure == Some(Errno::ENOENT) && filling.open[claim.faulting] && loaded != alone {
            failure = filling.copy(alone);
        }
        let brought_in = !filling.open[claim.faulting];
        let released = filling.finish();
        drop(gate);
        space.resources.defer_free(&released);
        if !brought_in
            && self.must_leave(claim.slot(claim.faulting))
            && let Some(remote) = &self.group.remote
        {
            remote.faults.recall(space, claim.page(claim.faulting));
            return Served::Done;
        }
        match failure {
            Some(errno) if !brought_in => after_failure(space, claim.page(claim.faulting), errno),
            _ => Served::Done,
        }
    }

    /// Loads the claimed pages into the buffer. Returns the largest range of loaded pages around the
    /// faulting page; empty if that page is left to another thread, or cannot be loaded, which kills
    /// the program.
    fn load(&mut self, space: &AddressSpace, claim: &Claim) -> Range<usize> {
        let resources = &space.resources;
        if self.waits {
            resources
                .swap
                .prefetch(claim.pages.iter().map(|(_, slot)| *slot));
        }
        let mut start = 0;
        for (index, (_, slot)) in claim.pages.iter().enumerate() {
            let is_left = self.must_leave(*slot);
            let loaded = if is_left {
                None
            } else {
                let page = &mut self.buffer[index];
                Some(resources.swap.load(*slot, page, &mut self.scratch))
            };
            let error = match loaded {
                Some(Ok(())) => continue,
                Some(Err(error)) => {
                    resources.errors.fetch_add(1, Ordering::Relaxed);
                    Some(error)
                }
                None => None,
            };
            if index == claim.faulting {
                let Some(error) = error else {
                    return 0..0;
                };
                kill_program(space, claim.page(index), &error);
                return 0..0;
            }
            if index > claim.faulting {
                return start..index;
            }
            start = index + 1;
        }
        start..claim.pages.len()
    }
}

/// Claimed and loaded pages that are being copied in under the shared gate.
struct Filling<'a> {
    space: &'a AddressSpace,
    gate: &'a Shared<'a>,
    claim: &'a Claim,
    buffer: &'a [Page],
    /// Pages that are neither copied in nor taken by an event yet.
    open: Vec<bool>,
    /// Slots with a reference to release: no page state owns it any more.
    released: Vec<Slot>,
}

impl Filling<'_> {
    fn is_claimed(&self, index: usize) -> bool {
        let entry = self.gate.table().entry(self.claim.page(index));
        entry.load() == self.claim.state(index)
    }

    /// Copies in the pages of a range of indices that are still claimed. Returns the error at which it
    /// stopped.
    fn copy(&mut self, range: Range<usize>) -> Option<Errno> {
        let mut next = range.start;
        while next < range.end {
            if !self.is_claimed(next) {
                // An event took the page; its reference stays with the claim.
                self.close(next);
                wake(self.space, self.claim.page(next), 1);
                next += 1;
                continue;
            }
            let first = self.claim.page(next);
            let run = (next..range.end)
                .zip(0..)
                .take_while(|(index, step)| {
                    self.claim.page(*index) == first.plus(*step) && self.is_claimed(*index)
                })
                .count();
            let source = &self.buffer.as_flattened()[next * PAGE_SIZE..];
            let result = copy(self.space, first, source, run as u64);
            let (done, errno) = match result {
                Ok(()) => (run, None),
                Err(Partial { done, errno }) => (done as usize / PAGE_SIZE, Some(errno)),
            };
            self.install_copied(next..next + done);
            next += done;
            match errno {
                None => {}
                Some(Errno::EEXIST) => {
                    // The program already has a page there, which is newer.
                    self.install(next);
                    wake(self.space, self.claim.page(next), 1);
                    next += 1;
                }
                // A partial copy returns EAGAIN whatever stopped it; the next try returns the real
                // error.
                Some(Errno::EAGAIN) if done > 0 => {}
                Some(errno) => return Some(errno),
            }
        }
        None
    }

    fn install_copied(&mut self, pages: Range<usize>) {
        self.space.add_resident_pages(pages.len() as i64);
        let counters = &self.space.resources.counters;
        counters
            .pages_in
            .fetch_add(pages.len() as u64, Ordering::Relaxed);
        if pages.contains(&self.claim.faulting) {
            counters.faults_swap_in.fetch_add(1, Ordering::Relaxed);
        }
        for index in pages {
            self.space
                .resources
                .refaults
                .note_in(self.claim.slot(index));
            self.install(index);
        }
    }

    /// Marks a page resident, as the program has it.
    fn install(&mut self, index: usize) {
        let page = self.claim.page(index);
        let state = if index == self.claim.faulting && self.space.clock.refaults_early(page) {
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
        self.released.push(self.claim.slot(index));
    }

    /// Returns pages that were not copied in to `Swapped`. Returns the slots to release.
    fn finish(mut self) -> Vec<Slot> {
        for index in 0..self.open.len() {
            if !self.open[index] {
                continue;
            }
            let (page, slot) = self.claim.pages[index];
            let entry = self.gate.table().entry(page);
            if !entry.replace(self.claim.state(index), PageState::Swapped(slot)) {
                self.released.push(slot);
            }
            // A thread that faulted on the page meanwhile waits for this claim.
            wake(self.space, page, 1);
        }
        self.released
    }
}
