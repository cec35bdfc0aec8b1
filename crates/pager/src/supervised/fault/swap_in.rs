//! Swap-in of the faulting page and its readahead window.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::replacement::List;
use crate::supervised::fault::claim::Claim;
use crate::supervised::fault::message::{Fault, Resolution};
use crate::supervised::fault::primitives::{after_failure, copy, kill_program, wake};
use crate::supervised::fault::room::Charged;
use crate::supervised::fault::service::{FaultService, UnfinishedLoad};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_swap::{LoadError, Page, Slot, TierKind};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl FaultService {
    /// Loads claimed pages and copies them in. Pages on other machines, for which this thread may not
    /// wait, stay swapped out. If the gate is missed, the pages are copied in by
    /// [`FaultService::finish_loads`].
    pub(crate) fn swap_in(&mut self, space: &Arc<AddressSpace>, claim: Claim) -> Resolution {
        let loaded = self.load(space, &claim);
        match self.enter(space) {
            Ok(gate) => self.copy_in(space, gate, &claim, loaded),
            Err(Resolution::GateMissed) => {
                self.unfinished.0.push(UnfinishedLoad {
                    space: space.clone(),
                    contents: self.buffer[..claim.pages()].to_vec(),
                    claim,
                    loaded,
                });
                Resolution::Done
            }
            Err(outcome) => {
                claim.abandon(space);
                outcome
            }
        }
    }

    /// Copies in the pages that were loaded when the gate was missed, of programs whose gate is available
    /// again.
    pub(crate) fn finish_loads(&mut self) {
        for load in std::mem::take(&mut self.unfinished.0) {
            let space = load.space.clone();
            match self.enter(&space) {
                Ok(gate) => {
                    self.buffer[..load.contents.len()].copy_from_slice(&load.contents);
                    let served = self.copy_in(&space, gate, &load.claim, load.loaded);
                    if served == Resolution::Retry {
                        wake(&space, load.claim.faulting_page(), 1);
                    }
                }
                Err(Resolution::GateMissed) => self.unfinished.0.push(load),
                Err(_) => load.claim.abandon(&space),
            }
        }
    }

    /// Copies loaded pages in.
    fn copy_in(
        &mut self,
        space: &Arc<AddressSpace>,
        gate: Shared<'_>,
        claim: &Claim,
        loaded: Range<usize>,
    ) -> Resolution {
        let mut filling = Filling {
            space,
            gate: &gate,
            claim,
            buffer: &self.buffer,
            open: vec![true; claim.pages()],
            released: Vec::new(),
            resident: PageState::RESIDENT,
            inactive: None,
        };
        let faulting = claim.faulting();
        filling.choose_list();
        let mut failure = filling.copy(loaded.clone());
        let alone = faulting..faulting + 1;
        // The window may cross into another mapping; the faulting page alone may still be copied.
        if failure == Some(Errno::ENOENT) && filling.open[faulting] && loaded != alone {
            failure = filling.copy(alone);
        }
        let brought_in = !filling.open[faulting];
        let released = filling.finish();
        drop(gate);
        space.resources.defer_free(&released);
        if !brought_in
            && self.must_leave(claim.slot(faulting))
            && let Some(remote) = &self.group.remote
        {
            // Its thread was woken, and faults again.
            let page = claim.page(faulting);
            remote.faults.recall(space, Fault::of_recall(space, page));
            return Resolution::Done;
        }
        match failure {
            Some(errno) if !brought_in => after_failure(space, claim.page(faulting), errno),
            _ => Resolution::Done,
        }
    }

    /// Loads the claimed pages into the buffer. Returns the largest range of loaded pages around the
    /// faulting page; empty if that page is left to another thread, or cannot be loaded, which kills
    /// the program.
    ///
    /// The faulting page comes first, and is waited for. A neighbour that is not there is given up, with those behind
    /// it: on another machine each could be waited for as long.
    fn load(&mut self, space: &AddressSpace, claim: &Claim) -> Range<usize> {
        let swap = &space.resources.swap;
        let faulting = claim.faulting();
        if self.waits {
            swap.prefetch(claim.slots());
        }
        let slot = claim.slot(faulting);
        if self.must_leave(slot) {
            return 0..0;
        }
        let page = &mut self.buffer[faulting];
        let loaded = if self.waits {
            swap.load(slot, page, &mut self.scratch)
        } else {
            swap.load_near(slot, page, &mut self.scratch)
        };
        if let Err(error) = loaded {
            if !self.was_sent(&error) {
                space.resources.errors.fetch_add(1, Ordering::Relaxed);
                kill_program(space, claim.page(faulting), &error);
            }
            return 0..0;
        }
        let mut is_loaded = |index: &usize| self.load_neighbour(space, claim, *index);
        let behind = (faulting + 1..claim.pages())
            .take_while(&mut is_loaded)
            .count();
        let before = (0..faulting).rev().take_while(&mut is_loaded).count();
        faulting - before..faulting + 1 + behind
    }

    fn load_neighbour(&mut self, space: &AddressSpace, claim: &Claim, index: usize) -> bool {
        let resources = &space.resources;
        let slot = claim.slot(index);
        if self.must_leave(slot) {
            return false;
        }
        let page = &mut self.buffer[index];
        let loaded = if self.waits {
            resources.swap.load_once(slot, page, &mut self.scratch)
        } else {
            resources.swap.load_near(slot, page, &mut self.scratch)
        };
        if let Err(error) = &loaded
            && !self.was_sent(error)
        {
            resources.errors.fetch_add(1, Ordering::Relaxed);
        }
        loaded.is_ok()
    }

    /// Whether this thread may not wait for other machines, and the page was sent there after
    /// [`FaultService::must_leave`] had looked.
    fn was_sent(&self, error: &LoadError) -> bool {
        let is_remote = matches!(
            error,
            LoadError::Tier {
                tier: TierKind::Remote,
                ..
            }
        );
        is_remote && !self.waits
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
    /// The state of the faulting page once it is in.
    resident: PageState,
    /// The pages that were brought in last, for the inactive list; `None` if pages become active.
    inactive: Option<PageRange>,
}

impl Filling<'_> {
    /// Tells the replacement that the pages come back, and chooses the list that they go on.
    fn choose_list(&mut self) {
        let clock = &self.space.clock;
        let now = self.space.resources.refaults.age();
        let mut replacement = lock(&clock.replacement);
        for index in 0..self.claim.pages() {
            if index != self.claim.faulting() {
                replacement.read_ahead(self.claim.shadow(index), now);
            }
        }
        let shadow = self.claim.shadow(self.claim.faulting());
        let list = replacement.refault(shadow, self.claim.pages(), now);
        if replacement.is_fifo() && clock.refaults_early(self.claim.faulting_page()) {
            self.resident = PageState::HOT;
        }
        if list == List::Inactive {
            self.inactive = Some(PageRange::default());
        }
    }

    /// Puts a page that was brought in on the inactive list, if it goes there.
    fn note_inactive(&mut self, page: VirtualPage) {
        let Some(range) = &mut self.inactive else {
            return;
        };
        if range.end == page {
            range.end = page.plus(1);
            return;
        }
        let (start, end) = (page, page.plus(1));
        let before = std::mem::replace(range, PageRange { start, end });
        self.add_inactive(before);
    }

    fn add_inactive(&self, range: PageRange) {
        if !range.is_empty() {
            lock(&self.space.clock.replacement).add_inactive(range);
        }
    }

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
            let charged = Charged::new(self.space, run as u64);
            let result = copy(self.space, first, source, run as u64);
            let (done, errno) = match result {
                Ok(()) => (run, None),
                Err(Partial { done, errno }) => (done as usize / PAGE_SIZE, Some(errno)),
            };
            charged.end(done as u64);
            self.space.note_arrived(PageRange {
                start: first,
                end: first.plus(done as u64),
            });
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
        let counters = &self.space.resources.counters;
        counters
            .pages_in
            .fetch_add(pages.len() as u64, Ordering::Relaxed);
        if self.space.is_held() {
            let stop = &self.space.stop;
            stop.pages_in
                .fetch_add(pages.len() as u64, Ordering::Relaxed);
        }
        if pages.contains(&self.claim.faulting()) {
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
        let state = if index == self.claim.faulting() {
            self.resident
        } else {
            PageState::RESIDENT
        };
        let entry = self.gate.table().entry(page);
        if entry.replace(self.claim.state(index), state) && state == PageState::RESIDENT {
            self.note_inactive(page);
        }
        self.close(index);
    }

    fn close(&mut self, index: usize) {
        self.open[index] = false;
        self.released.push(self.claim.slot(index));
    }

    /// Returns pages that were not copied in to `Swapped`. Returns the slots to release.
    fn finish(mut self) -> Vec<Slot> {
        if let Some(range) = self.inactive.take() {
            self.add_inactive(range);
        }
        for index in 0..self.open.len() {
            if !self.open[index] {
                continue;
            }
            let (page, slot) = (self.claim.page(index), self.claim.slot(index));
            let shadow = self.claim.shadow(index).without_sample();
            let entry = self.gate.table().entry(page);
            if !entry.replace(self.claim.state(index), PageState::Swapped(slot, shadow)) {
                self.released.push(slot);
            }
            // A thread that faulted on the page meanwhile waits for this claim.
            wake(self.space, page, 1);
        }
        self.released
    }
}
