//! Fault service, in the faulting thread or in the listener.

use super::area::{Area, FaultServer, Served};
use super::backoff::pause;
use super::engine_state::EngineState;
use super::limits::{DEFERRED_FREES, WINDOW};
use super::stats::count;
use super::streams::Advice;
use super::worker::{Claim, Worker};
use crate::density::{BLOCK, Density};
use crate::page_state::StageIndex;
use crate::page_state::{ClaimNumber, PageState};
use crate::replacement::List;
use crate::sync::lock;
use crate::zeros::{ZERO_PAGES, ZEROS};
use memfold_swap::{LoadError, PAGE_SIZE, Slot, TierKind};
use memfold_sys::Errno;
use memfold_sys::signal::die;
use memfold_sys::thread::nap;
use memfold_sys::uffd::Partial;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

/// Pages that one fault swaps in, at most. More saves faults of sequential readers, and delays this one.
const SWAP_IN_WINDOW: u32 = 16;
/// Pages that one fault fills with zeros, at most. More saves faults, and makes pages resident that may
/// stay unused.
const ZERO_WINDOW: u32 = 512;
const _: () = assert!(SWAP_IN_WINDOW as usize <= WINDOW);

const _: () = assert!(ZERO_WINDOW as usize <= ZERO_PAGES);

/// Attempts to copy a page while the kernel answers ENOMEM: about ten seconds in all. More waits longer
/// for the OOM killer to free memory before the program is aborted.
const MOST_NAPS: u32 = 160;
/// The longest sleep between two of these attempts, as the binary logarithm of milliseconds.
const LONGEST_NAP_LOG2_MS: u32 = 6;

/// Consecutive faults on a page that is resident before the program is aborted. Threads that faulted
/// before another thread brought the page in count too, so this must exceed the number of threads.
const MOST_FUTILE: u64 = 20_000;

/// Looks at a page that another thread brings in before the access is repeated instead, where that thread
/// may wait for a network. More spares accesses, and holds a worker for longer.
const MOST_PAUSES: u32 = 8;
/// How long a thread without victims waits for what others have claimed, before it counts as an attempt in vain. A larger
/// value keeps the limit where these threads have no CPU, and delays faults where nothing can leave.
const OTHERS_PATIENCE: Duration = Duration::from_millis(100);

/// Why an operation on the userfaultfd fails with `EBADF` or `ENOTTY`.
pub(super) const CLOSED: &str = "; the program has closed memfold's userfaultfd (closefrom?)";

/// Why pages are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// A thread faulted on the first of them.
    Fault,
    /// Prefetch or readahead: they may be left out.
    Advice,
    /// A thread faulted on the first of them, which may be on other machines; it does not wait here.
    Remote,
}

/// The state of a claimed page. Claims need no numbers here: pages keep their addresses, and only the
/// claiming thread changes a claimed page.
fn filling(slot: Slot) -> PageState {
    PageState::Filling(slot, ClaimNumber::default())
}

impl FaultServer for EngineState {
    fn serve(
        &self,
        area: &Arc<Area>,
        address: usize,
        thread: usize,
        worker: &mut Worker,
    ) -> Served {
        let Some(page) = area.page_at(address) else {
            return Served::Done;
        };
        if let Some(blocks) = &area.blocks {
            self.serve_block(area, blocks, page, worker);
            return Served::Done;
        }
        let entry = &area.entries()[page];
        for attempt in 0.. {
            let state = entry.load();
            match state {
                PageState::Swapped(slot, _) => {
                    if self.is_remote(slot)
                        && let Some(remote) = &self.remote
                    {
                        let start = area.address(page);
                        return remote.ask(area, start, || {
                            let mut span = self.streams.advise(thread, address, SWAP_IN_WINDOW);
                            span.address = start as i64;
                            span
                        });
                    }
                    let advice = self.streams.advise(thread, address, SWAP_IN_WINDOW);
                    if let Some(span) = advice.ahead() {
                        self.readahead.ask(area, span);
                    }
                    if self.swap_in(area, advice, Cause::Fault, worker) > 0 {
                        count(&self.counters.faults_swap_in, 1);
                        if advice.count == 1 {
                            self.look_around(area, page, worker);
                        }
                        return Served::Done;
                    }
                }
                // Another thread made the page resident since the fault.
                PageState::Resident { .. } if attempt > 0 => return Served::Done,
                PageState::Hole | PageState::Removed(_) | PageState::Resident { .. } => {
                    let advice = self.streams.advise(thread, address, ZERO_WINDOW);
                    if self.fill_zeros(area, page, state, advice, worker) {
                        count(&self.counters.faults_zero_fill, 1);
                        return Served::Done;
                    }
                }
                PageState::Staged(place) => {
                    if entry.replace(state, PageState::Returning(place)) {
                        self.return_from_stage(area, page, place, PageState::FRESH);
                        count(&self.counters.faults_cache, 1);
                        return Served::Done;
                    }
                }
                // It may take as long as a network does: not with a worker held.
                PageState::Filling(..) if self.remote.is_some() && attempt > MOST_PAUSES => {
                    return Served::Busy;
                }
                PageState::Filling(..) if attempt == 0 && self.remote.is_none() => {
                    self.help(area, address, thread, worker);
                }
                PageState::Moving(_)
                | PageState::Filling(..)
                | PageState::Returning(_)
                | PageState::Clearing => pause(attempt),
            }
        }
        unreachable!("attempts have no end")
    }
}

impl EngineState {
    /// The page is being swapped in, most likely by the readahead thread, which the program has caught up
    /// with: swaps in pages further on meanwhile.
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

    /// Fault-around for a random access: swaps in the block of a page if enough of it is resident that
    /// most of it will be touched. The readahead thread does what it can; the next fault in the block
    /// swaps in pages that it has not got to.
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

    /// Reserves room for up to `wanted` pages, by direct reclaim if a fault needs it. Returns for how many
    /// pages: at least one for a fault.
    pub(super) fn make_room(&self, wanted: u64, cause: Cause, worker: &mut Worker) -> u64 {
        if self.account.is_below_low() {
            self.reclaim_event.set();
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
        let (mut fruitless, mut attempt) = (0, 0);
        let mut waited = Duration::ZERO;
        while fruitless < 8 {
            self.wait_for_store();
            let began = Instant::now();
            if self.reclaim_batch(worker) > 0 {
                (fruitless, attempt, waited) = (0, 0, Duration::ZERO);
            } else if self.account.has_held_batches() && waited < OTHERS_PATIENCE {
                // Other threads have claimed what could be: they make room, or put it back.
                pause(attempt);
                attempt += 1;
                waited += began.elapsed();
            } else {
                fruitless += 1;
                std::thread::yield_now();
            }
            if self.account.reserve(1) {
                return 1;
            }
        }
        // All resident pages are pinned or incompressible.
        self.relax_limit();
        self.account.reserve_beyond(1);
        1
    }

    /// Swaps in the pages of an advice that are in the pool and have room. Returns how many; 0 if the
    /// first one of a fault is no longer in the pool.
    pub(super) fn swap_in(
        &self,
        area: &Area,
        advice: Advice,
        cause: Cause,
        worker: &mut Worker,
    ) -> usize {
        let room = self.make_room(u64::from(advice.count), cause, worker);
        self.swap_in_with(room, area, advice, cause, worker)
    }

    /// As [`swap_in`](Self::swap_in), with room for `room` pages, which was reserved; what is not needed of it is given back.
    pub(super) fn swap_in_with(
        &self,
        room: u64,
        area: &Area,
        advice: Advice,
        cause: Cause,
        worker: &mut Worker,
    ) -> usize {
        self.claim(area, advice, room as usize, cause, worker);
        let claimed = worker.claims.len() as u64;
        self.account.release(room - claimed);
        if claimed == 0 {
            return 0;
        }
        self.load_claims(area, cause, worker);
        self.copy_claims(area, worker);
        count(&self.counters.pages_in, worker.claims.len() as u64);
        self.defer_frees(worker);
        worker.claims.len()
    }

    /// Claims the pages of an advice that are in the pool, up to `room`; none for a fault whose first page
    /// is not. Those on other machines are left to the threads that may wait for them.
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
                PageState::Swapped(slot, shadow)
                    if (cause == Cause::Remote || !self.is_remote(slot))
                        && entry.replace(state, filling(slot)) =>
                {
                    worker.claims.push(Claim { page, slot, shadow });
                }
                _ if cause != Cause::Advice && worker.claims.is_empty() => return,
                _ => {}
            }
        }
    }

    /// Loads claimed pages into the worker's buffer. A claim whose page cannot be read is given up. If it
    /// is the first of a fault, the program is aborted.
    fn load_claims(&self, area: &Area, cause: Cause, worker: &mut Worker) {
        if cause == Cause::Remote {
            self.space
                .prefetch(worker.claims.iter().map(|claim| claim.slot));
        }
        let (mut loaded, mut failed) = (0, false);
        for index in 0..worker.claims.len() {
            let claim = worker.claims[index];
            let (buffer, scratch) = worker.buffer_and_scratch();
            let out = &mut buffer[loaded];
            let found = match cause {
                Cause::Remote if index == 0 => self.space.load(claim.slot, out, scratch),
                // One that the store does not return may be followed by others.
                Cause::Remote if failed => Err(LoadError::Tier {
                    slot: claim.slot,
                    tier: TierKind::Remote,
                    reason: "its neighbour is not there",
                }),
                Cause::Remote => self.space.load_once(claim.slot, out, scratch),
                Cause::Fault | Cause::Advice => self.space.load_near(claim.slot, out, scratch),
            };
            // The page may have been sent since it was claimed.
            let is_far = matches!(
                found,
                Err(LoadError::Tier {
                    tier: TierKind::Remote,
                    ..
                })
            ) && cause != Cause::Remote;
            failed |= found.is_err();
            match found {
                Ok(()) => {
                    worker.claims[loaded] = claim;
                    loaded += 1;
                }
                Err(error) if cause != Cause::Advice && index == 0 && !is_far => {
                    unreadable(&error);
                }
                Err(_) => {
                    area.entries()[claim.page].replace(
                        filling(claim.slot),
                        PageState::Swapped(claim.slot, claim.shadow),
                    );
                    self.account.release(1);
                }
            }
        }
        worker.claims.truncate(loaded);
    }

    /// Copies the loaded pages in, neighbours together.
    fn copy_claims(&self, area: &Area, worker: &mut Worker) {
        let entries = area.entries();
        let list = self.note_refault(&worker.claims);
        let state = match list {
            List::Active => PageState::FRESH,
            List::Inactive => PageState::RESIDENT,
        };
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
                // Counted first: a thread that moves the page out subtracts it again.
                area.note_resident(claim.page);
                entries[claim.page].replace(filling(claim.slot), state);
            }
            if list == List::Inactive {
                self.add_inactive(area, first..first + run);
            }
            start += run;
        }
    }

    /// Copies whole pages to missing ones that the caller has claimed. A page that is present was put
    /// there by the program's own madvise or userfaultfd, and is newer: it stays. Returns how many were
    /// present.
    fn copy(&self, target: usize, bytes: &[u8]) -> usize {
        let mut done = 0;
        let mut found = 0;
        let (mut attempt, mut naps) = (0, 0);
        let mut most = bytes.len();
        while done < bytes.len() {
            let rest = &bytes[done..bytes.len().min(done + most)];
            let target = (target + done) as u64;
            match self.uffd().copy_in(target, rest, rest.len() as u64) {
                Ok(()) => done += rest.len(),
                Err(partial) => {
                    done += partial.done as usize;
                    match partial.errno {
                        // In thread mode a thread that waits for this page is not woken by the copy
                        // of other pages.
                        Errno::EEXIST => {
                            let _ = self.uffd().wake(target + partial.done, PAGE_SIZE as u64);
                            done += PAGE_SIZE;
                            found += 1;
                        }
                        Errno::EAGAIN if attempt < 1000 => {
                            pause(attempt);
                            attempt += 1;
                        }
                        Errno::ENOMEM if naps < MOST_NAPS => {
                            nap(Duration::from_millis(1 << naps.min(LONGEST_NAP_LOG2_MS)));
                            naps += 1;
                        }
                        // The program has split the mapping (`mlock`, `mbind`), and the pages lie on both sides.
                        Errno::ENOENT if most > PAGE_SIZE => most = PAGE_SIZE,
                        Errno::ESRCH => break,
                        _ => cannot_copy(partial),
                    }
                }
            }
        }
        found
    }

    /// Defers the release of swapped-in pages' slots, until there are enough for a bulk release.
    fn defer_frees(&self, worker: &mut Worker) {
        worker.slots.clear();
        let claims = &worker.claims;
        worker.slots.extend(claims.iter().map(|claim| claim.slot));
        let mut deferred = match self.deferred_frees.try_lock() {
            Ok(deferred) => deferred,
            Err(TryLockError::Poisoned(deferred)) => deferred.into_inner(),
            Err(TryLockError::WouldBlock) => return self.release(&worker.slots),
        };
        deferred.extend_from_slice(&worker.slots);
        if deferred.len() + WINDOW > DEFERRED_FREES {
            self.release(&deferred);
            deferred.clear();
        }
    }

    fn release(&self, slots: &[Slot]) {
        match slots {
            [] => {}
            [slot] => self.space.release(*slot),
            _ => self.space.release_bulk(slots),
        }
    }

    /// Releases what [`defer_frees`](Self::defer_frees) has put aside.
    pub(super) fn release_deferred(&self) {
        let mut deferred = lock(&self.deferred_frees);
        self.release(&deferred);
        deferred.clear();
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
            // It was counted before. The program dropped it by its own madvise, or it is present.
            area.note_absent(page);
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
            area.note_resident(page + offset);
            entry.replace(PageState::Clearing, PageState::FRESH);
        }
        if futile > MOST_FUTILE {
            cannot_access();
        }
        area.note_futile(page, futile);
        count(&self.counters.pages_zero_filled, room as u64);
        true
    }

    /// Copies a staged page back, because it is touched or cannot be stored. It cannot be moved back: the
    /// thread that compresses it reads the stage.
    pub(super) fn return_from_stage(
        &self,
        area: &Area,
        page: usize,
        place: StageIndex,
        to: PageState,
    ) {
        // SAFETY: `drop_staged` keeps the page in the stage while its state is `Returning`, and nothing
        // writes to the stage.
        let bytes = unsafe { std::slice::from_raw_parts(self.place(place), PAGE_SIZE) };
        self.copy(area.address(page), bytes);
        area.note_resident(page);
        area.entries()[page].replace(PageState::Returning(place), to);
    }

    /// Whether the engine is being dropped.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// Aborts the program: a page that it touches cannot be read back from the pool.
#[cold]
pub(super) fn unreadable(error: &LoadError) -> ! {
    die(&[
        "cannot swap in a page of a region: ",
        &error.to_string(),
        "; the program is aborted before it reads wrong data",
    ])
}

#[cold]
fn cannot_access() -> ! {
    die(&[
        "every access to a resident page of a region faults: the host may have failed to swap it in \
         (see dmesg); the program is aborted",
    ])
}

#[cold]
fn cannot_copy(partial: Partial) -> ! {
    die(&[
        "cannot copy a page into a region: ",
        &partial.errno.to_string(),
        match partial.errno {
            Errno::ENOMEM => "; the host, or the cgroup, has had no free memory for ten seconds",
            Errno::EBADF | Errno::ENOTTY => CLOSED,
            _ => "; the program must not munmap, mremap or mprotect regions",
        },
    ])
}
