//! Serving a fault, in whichever thread does it.

use super::area::Area;
use super::engine::{SPENT_SLOTS, Shared};
use super::stats::count;
use super::streams::Advice;
use super::worker::{Claim, WINDOW, Worker};
use crate::density::{BLOCK, Density};
use crate::page_state::{ClaimNumber, PageState, StageIndex};
use crate::zeros::{ZERO_PAGES, ZEROS};
use memfold_swap::{LoadError, PAGE_SIZE, Slot};
use memfold_sys::Errno;
use memfold_sys::signal::die;
use memfold_sys::thread::nap;
use memfold_sys::uffd::Partial;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

/// Pages brought in at one fault from the pool, at most.
const SWAP_IN_WINDOW: u32 = 16;
/// Pages of zeros brought in at one fault, at most.
const ZERO_WINDOW: u32 = 512;
const _: () = assert!(SWAP_IN_WINDOW as usize <= WINDOW);
const _: () = assert!(ZERO_WINDOW as usize <= ZERO_PAGES);

/// So often a page is asked for again where the kernel has none, after up to 64 ms each: ten seconds
/// in all. It has some soon where it is ending a process for that.
const MOST_NAPS: u32 = 160;
const LONGEST_NAP_LOG2_MS: u32 = 6;

/// So often in a row a touch of a page may fault though it is there: as often as there are threads
/// that touched it before another brought it in, and some.
const MOST_FUTILE: u64 = 20_000;

/// For whose sake pages are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// A thread cannot go on without the first of them.
    Fault,
    /// A thread goes on sooner with them.
    Advice,
}

/// The state of a claimed page. Claims need no numbers here: pages stay where they are, and nobody else
/// changes a page that is claimed.
fn filling(slot: Slot) -> PageState {
    PageState::Filling(slot, ClaimNumber::default())
}

/// Waits a little for what another thread is about to finish, longer each time.
pub(super) fn pause(turn: u32) {
    const SPINS: u32 = 6;
    const YIELDS: u32 = 100;
    const SHORTEST_NAP: Duration = Duration::from_micros(50);
    if turn < SPINS {
        for _ in 0..1 << turn {
            std::hint::spin_loop();
        }
    } else if turn < SPINS + YIELDS {
        // The other may need this very CPU.
        std::thread::yield_now();
    } else {
        // Who only yields keeps the CPU from threads of a lower priority.
        nap(SHORTEST_NAP * (1 << (turn - SPINS - YIELDS).min(2)));
    }
}

impl Shared {
    /// Brings in the page at an address of the area, with what is likely to be touched next. When
    /// it returns, the access can be made again; it may have to be served again then, if the page
    /// was moved out in between.
    pub(super) fn serve(
        &self,
        area: &Arc<Area>,
        address: usize,
        thread: usize,
        worker: &mut Worker,
    ) {
        let Some(page) = area.page_at(address) else {
            return;
        };
        if let Some(protected) = &area.protected {
            return self.serve_block(area, protected, page, worker);
        }
        let entry = &area.entries()[page];
        for turn in 0.. {
            let state = entry.load();
            match state {
                PageState::Swapped(_) => {
                    let advice = self.streams.advise(thread, address, SWAP_IN_WINDOW);
                    if let Some(span) = advice.ahead() {
                        self.readahead.ask(area, span);
                    }
                    if self.swap_in(area, advice, Cause::Fault, worker) > 0 {
                        count(&self.counters.faults_swap_in, 1);
                        if advice.count == 1 {
                            self.look_around(area, page, worker);
                        }
                        return;
                    }
                }
                // In transit when it was touched, and there now.
                PageState::Resident { .. } if turn > 0 => return,
                PageState::Hole | PageState::Removed(_) | PageState::Resident { .. } => {
                    let advice = self.streams.advise(thread, address, ZERO_WINDOW);
                    if self.fill_zeros(area, page, state, advice, worker) {
                        count(&self.counters.faults_zero_fill, 1);
                        return;
                    }
                }
                PageState::Staged(place) => {
                    if entry.replace(state, PageState::Returning(place)) {
                        self.return_from_stage(area, page, place, PageState::FRESH);
                        count(&self.counters.faults_cache, 1);
                        return;
                    }
                }
                PageState::Filling(..) if turn == 0 => self.help(area, address, thread, worker),
                PageState::Moving(_)
                | PageState::Filling(..)
                | PageState::Returning(_)
                | PageState::Clearing => pause(turn),
            }
        }
    }

    /// The page is being brought in, most likely by readahead, which the program has caught up
    /// with: bring in something further on meanwhile.
    fn help(&self, area: &Arc<Area>, address: usize, thread: usize, worker: &mut Worker) {
        let advice = self.streams.advise(thread, address, SWAP_IN_WINDOW);
        if let Some(span) = advice.ahead() {
            self.readahead.ask(area, span);
        }
        if advice.count > 1 {
            let further = advice.behind(advice.count);
            self.swap_in(area, further, Cause::Advice, worker);
        }
    }

    /// Has what lies around a page that was asked for by itself brought in, where most of it will
    /// be asked for. The readahead does what it can; what it has not got to by the next fault in
    /// the block is brought in by that.
    fn look_around(&self, area: &Arc<Area>, page: usize, worker: &mut Worker) {
        let possible = self.readahead.is_enabled() && self.account.has_ample(BLOCK as u64);
        if !possible || area.density_of_chunk(page) == Density::Sparse {
            return;
        }
        let first = page - page % BLOCK;
        let block = &area.entries()[first..area.pages.min(first + BLOCK)];
        let density = Density::of_entries(block);
        if density == Density::Sparse {
            return;
        }
        let run = |pages: usize| Advice::run(area.address(page - page % pages), pages as u32);
        if density == Density::JustDense && self.readahead.ask(area, run(BLOCK)) {
            return;
        }
        let around = run(SWAP_IN_WINDOW as usize);
        let brought = self.swap_in(area, around, Cause::Advice, worker);
        count(&self.counters.pages_read_ahead, brought as u64);
    }

    /// Takes room for up to `wanted` pages, and makes some if there is none. Returns for how many.
    pub(super) fn make_room(&self, wanted: u64, cause: Cause, worker: &mut Worker) -> u64 {
        if self.account.is_low() {
            self.reclaim_bell.ring();
        }
        if self.account.reserve(wanted) {
            return wanted;
        }
        if cause == Cause::Advice {
            return 0;
        }
        if wanted > 1 && self.account.reserve(1) {
            return 1;
        }
        count(&self.counters.direct_reclaims, 1);
        let mut fruitless = 0;
        while fruitless < 8 {
            if self.reclaim_batch(worker) == 0 {
                fruitless += 1;
                std::thread::yield_now();
            }
            if self.account.reserve(1) {
                return 1;
            }
        }
        // Everything is pinned or cannot be stored.
        self.relax_limit();
        self.account.reserve_beyond(1);
        1
    }

    /// Brings the pages of an advice in from the pool, as many as are there and have room. Returns
    /// how many; 0 if the first is not there to be brought in any more.
    pub(super) fn swap_in(
        &self,
        area: &Area,
        advice: Advice,
        cause: Cause,
        worker: &mut Worker,
    ) -> usize {
        let room = self.make_room(u64::from(advice.count), cause, worker);
        self.claim(area, advice, room as usize, cause, worker);
        let claimed = worker.claims.len() as u64;
        self.account.release(room - claimed);
        if claimed == 0 {
            return 0;
        }
        self.load_claims(area, cause, worker);
        self.copy_claims(area, worker);
        count(&self.counters.pages_in, worker.claims.len() as u64);
        self.spend(worker);
        worker.claims.len()
    }

    /// Claims the pages of an advice that are in the pool, up to `room`. For a fault the first must
    /// be among them, and the rest ends at a page that is not.
    fn claim(&self, area: &Area, advice: Advice, room: usize, cause: Cause, worker: &mut Worker) {
        worker.claims.clear();
        let entries = area.entries();
        let mut last = usize::MAX;
        for address in advice.addresses() {
            if worker.claims.len() == room {
                break;
            }
            let Some(page) = usize::try_from(address)
                .ok()
                .and_then(|address| area.page_at(address))
            else {
                break;
            };
            if page == last {
                continue;
            }
            last = page;
            let entry = &entries[page];
            let state = entry.load();
            match state {
                PageState::Swapped(slot) if entry.replace(state, filling(slot)) => {
                    worker.claims.push(Claim { page, slot });
                }
                _ if cause == Cause::Fault && worker.claims.is_empty() => return,
                _ => {}
            }
        }
    }

    /// Loads claimed pages into the worker's buffer. Claims whose page cannot be read are given up,
    /// but for the first of a fault, without which the program cannot go on.
    fn load_claims(&self, area: &Area, cause: Cause, worker: &mut Worker) {
        let mut loaded = 0;
        for index in 0..worker.claims.len() {
            let claim = worker.claims[index];
            let (buffer, scratch) = worker.buffer_and_scratch();
            match self.space.load(claim.slot, &mut buffer[loaded], scratch) {
                Ok(()) => {
                    worker.claims[loaded] = claim;
                    loaded += 1;
                }
                Err(error) if cause == Cause::Fault && index == 0 => unreadable(&error),
                Err(_) => {
                    area.entries()[claim.page]
                        .replace(filling(claim.slot), PageState::Swapped(claim.slot));
                    self.account.release(1);
                }
            }
        }
        worker.claims.truncate(loaded);
    }

    /// Copies the loaded pages in, neighbours together.
    fn copy_claims(&self, area: &Area, worker: &mut Worker) {
        let entries = area.entries();
        let mut start = 0;
        while start < worker.claims.len() {
            let first = worker.claims[start].page;
            let run = worker.claims[start..]
                .iter()
                .enumerate()
                .take_while(|(offset, claim)| claim.page == first + offset)
                .count();
            let bytes = worker.buffer()[start..start + run].as_flattened();
            self.copy(area.address(first), bytes);
            for claim in &worker.claims[start..start + run] {
                // Counted first: who moves it out takes it off the count.
                area.arrived(claim.page);
                entries[claim.page].replace(filling(claim.slot), PageState::FRESH);
            }
            start += run;
        }
    }

    /// Copies whole pages to missing ones that the caller has claimed. A page that is there after
    /// all was put there by the program behind our back, and is newer. Returns how many were.
    fn copy(&self, target: usize, bytes: &[u8]) -> usize {
        let mut done = 0;
        let mut found = 0;
        let (mut turn, mut naps) = (0, 0);
        while done < bytes.len() {
            let rest = &bytes[done..];
            let target = (target + done) as u64;
            match self.uffd().copy_in(target, rest, rest.len() as u64) {
                Ok(()) => break,
                Err(partial) => {
                    done += partial.done as usize;
                    match partial.errno {
                        // Who waited for this very page in thread mode is not woken by others'.
                        Errno::EEXIST => {
                            let _ = self.uffd().wake(target + partial.done, PAGE_SIZE as u64);
                            done += PAGE_SIZE;
                            found += 1;
                        }
                        Errno::EAGAIN if turn < 1000 => {
                            pause(turn);
                            turn += 1;
                        }
                        Errno::ENOMEM if naps < MOST_NAPS => {
                            nap(Duration::from_millis(1 << naps.min(LONGEST_NAP_LOG2_MS)));
                            naps += 1;
                        }
                        Errno::ESRCH => break,
                        _ => cannot_copy(partial),
                    }
                }
            }
        }
        found
    }

    /// Releases the slots of pages that were brought in, now and then.
    fn spend(&self, worker: &mut Worker) {
        worker.slots.clear();
        let claims = &worker.claims;
        worker.slots.extend(claims.iter().map(|claim| claim.slot));
        let mut spent = match self.spent.try_lock() {
            Ok(spent) => spent,
            Err(TryLockError::Poisoned(spent)) => spent.into_inner(),
            Err(TryLockError::WouldBlock) => return self.release(&worker.slots),
        };
        spent.extend_from_slice(&worker.slots);
        if spent.len() + WINDOW > SPENT_SLOTS {
            self.release(&spent);
            spent.clear();
        }
    }

    fn release(&self, slots: &[Slot]) {
        match slots {
            [] => {}
            [slot] => self.space.release(*slot),
            _ => self.space.release_bulk(slots),
        }
    }

    /// Releases what [`spend`](Self::spend) has put aside.
    pub(super) fn release_spent(&self) {
        let mut spent = super::engine::lock(&self.spent);
        self.release(&spent);
        spent.clear();
    }

    /// Fills missing pages with zeros: the page of the fault, found in `state`, and holes that the
    /// advice names. `false` if the state has changed.
    fn fill_zeros(
        &self,
        area: &Area,
        page: usize,
        state: PageState,
        advice: Advice,
        worker: &mut Worker,
    ) -> bool {
        let entries = area.entries();
        // Only neighbours in memory; a stride is as likely to touch a page once as never.
        let wanted = if advice.stride == PAGE_SIZE as i64 {
            advice.count as usize
        } else {
            1
        };
        let wanted = wanted.min(area.pages - page);
        let mut room = self.make_room(wanted as u64, Cause::Fault, worker) as usize;
        if !entries[page].replace(state, PageState::Clearing) {
            self.account.release(room as u64);
            return false;
        }
        let was_resident = matches!(state, PageState::Resident { .. });
        if was_resident {
            // It was counted before; the program dropped it behind our back, or it is there.
            area.left(page);
            self.account.release(1);
        }
        let claimed = 1 + entries[page + 1..]
            .iter()
            .take(room - 1)
            .take_while(|entry| entry.replace(PageState::Hole, PageState::Clearing))
            .count();
        self.account.release((room - claimed) as u64);
        room = claimed;
        let found = self.copy(area.address(page), &ZEROS[..room * PAGE_SIZE]);
        let futile = if was_resident && found > 0 {
            area.futile(page) + 1
        } else {
            0
        };
        for (offset, entry) in entries[page..page + room].iter().enumerate() {
            area.arrived(page + offset);
            entry.replace(PageState::Clearing, PageState::FRESH);
        }
        if futile > MOST_FUTILE {
            cannot_access();
        }
        area.note_futile(page, futile);
        count(&self.counters.pages_zero_filled, room as u64);
        true
    }

    /// A staged page is touched or put back: it comes back by a copy, as whoever compresses it reads
    /// the stage.
    pub(super) fn return_from_stage(
        &self,
        area: &Area,
        page: usize,
        place: StageIndex,
        to: PageState,
    ) {
        // SAFETY: the place is present until nobody is returning from it (`reclaim.rs`), and
        // nothing writes to the stage.
        let bytes = unsafe { std::slice::from_raw_parts(self.place(place), PAGE_SIZE) };
        self.copy(area.address(page), bytes);
        area.arrived(page);
        area.entries()[page].replace(PageState::Returning(place), to);
    }

    /// Whether the engine is being dropped.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// The program must not go on with wrong bytes, and cannot without.
#[cold]
pub(super) fn unreadable(error: &LoadError) -> ! {
    die(&[
        "a page of a region cannot be read back: ",
        &error.to_string(),
        "; the program is stopped before it sees wrong data",
    ])
}

#[cold]
fn cannot_access() -> ! {
    die(&[
        "a page of a region is there, but every access to it fails; \
         has the host lost what it had swapped out of it?",
    ])
}

#[cold]
fn cannot_copy(partial: Partial) -> ! {
    die(&[
        "a page cannot be put into a region: ",
        &partial.errno.to_string(),
        match partial.errno {
            Errno::ENOMEM => "; the system, or the control group, has had no memory for seconds",
            Errno::EBADF => "; the program has closed memfold's descriptor",
            _ => "; was the region unmapped or changed from outside?",
        },
    ])
}
