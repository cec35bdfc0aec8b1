//! Serving page faults.
//!
//! A service never waits for a batch that its page is not part of, never needs the program's
//! helper, and always ends in one of four ways: the page was brought in (the kernel wakes the
//! thread), the thread is woken to fault again, the fault is deferred until there is room, or it
//! is to be tried again after the events that the kernel holds back have been read.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::cow::admit_write;
use crate::supervised::fault::swap_in::{Claim, SWAP_IN_WINDOW};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_swap::{Page, Scratch};
use memfold_sys::uffd::{FAULT_PROTECTED, FAULT_WRITE, Message, Partial};
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pages of zeros brought in at once, at most.
pub const ZERO_WINDOW: u32 = 512;
/// Below this room, fill no page that was not asked for.
const WINDOW_ROOM_PAGES: u64 = 64;

/// A fault as its message told it.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    pub page: VirtualPage,
    pub write: bool,
    /// The page is there, and waits for leave to be written.
    pub protected: bool,
    /// How often the program had memory unregistered when this was told.
    pub unregistered: u32,
}

impl Fault {
    pub fn of_message(message: &Message, space: &AddressSpace) -> Fault {
        Fault {
            unregistered: space.unregistered.load(Ordering::Relaxed),
            page: VirtualPage::containing(message.fault_address()),
            write: message.fault_flags() & FAULT_WRITE != 0,
            protected: message.fault_flags() & FAULT_PROTECTED != 0,
        }
    }
}

impl Fault {
    /// Whether memory was unregistered since it was told, maybe its page. The kernel woke its thread
    /// then; if the page is missing still, that is another userfaultfd's to be told, and a page put
    /// there by this one would be wrong. The gate is held shared.
    pub fn is_outdated(&self, space: &AddressSpace) -> bool {
        self.unregistered != space.unregistered.load(Ordering::Relaxed)
    }
}

/// How a service ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The thread runs on, or will once the one who has its page is done.
    Done,
    /// Events must be read first; then serve it again.
    Retry,
}

/// What a thread that serves faults keeps.
pub struct Server {
    pub buffer: Vec<Page>,
    pub scratch: Scratch,
}

impl Default for Server {
    fn default() -> Self {
        Server {
            buffer: vec![[0; PAGE_SIZE]; SWAP_IN_WINDOW as usize],
            scratch: Scratch::for_loads(),
        }
    }
}

static ZEROS: [u8; ZERO_WINDOW as usize * PAGE_SIZE] = [0; ZERO_WINDOW as usize * PAGE_SIZE];

/// Whether a service may wait for room, or must go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    MayDefer,
    Now,
    /// At once, too. Where pages were dropped this does not say that it is over.
    OfHelper,
}

impl Server {
    /// Serves one fault.
    pub fn serve(
        &mut self,
        space: &Arc<AddressSpace>,
        fault: Fault,
        admission: Admission,
    ) -> Served {
        if space.asks_for_number(fault.page) {
            return self.answer_beacon(space, fault.page);
        }
        if let Some(place) = space.place_at(fault.page) {
            return fill_stage(space, fault.page, place);
        }
        if fault.protected {
            return admit_write(space, fault, admission);
        }
        for _ in 0..4 {
            let Ok(gate) = space.shared() else {
                return Served::Done;
            };
            let entry = gate.table().entry(fault.page);
            let state = entry.load();
            match state {
                PageState::Moving(_) => {
                    if space.settle(&gate).is_some() {
                        continue;
                    }
                    let posted = lock(&space.mover).posted();
                    drop(gate);
                    space.channel.wait_done(posted, Duration::from_micros(300));
                }
                PageState::Staged(place) => {
                    if entry.replace(state, PageState::Returning(place)) {
                        let counters = &space.group().counters;
                        counters.faults_cache.fetch_add(1, Ordering::Relaxed);
                        return self.bring_back(&gate, space, fault.page, place);
                    }
                }
                // Whoever has it wakes the thread.
                PageState::Returning(_) | PageState::Filling(..) | PageState::Clearing => {
                    return Served::Done;
                }
                PageState::Hole | PageState::Removed(_) | PageState::Resident { .. } => {
                    if fault.is_outdated(space) {
                        // Where it was not woken, it is told anew.
                        wake(space, fault.page, 1);
                        return Served::Done;
                    }
                    // A resident page was brought in since, most likely, and needs no room.
                    let needs_room = !matches!(state, PageState::Resident { .. });
                    if needs_room && must_wait(space, fault, admission) {
                        return Served::Done;
                    }
                    if let Some(served) = fill_zeros(&gate, space, fault, admission) {
                        return served;
                    }
                }
                PageState::Swapped(_) => {
                    if must_wait(space, fault, admission) {
                        return Served::Done;
                    }
                    let claim = Claim::make(&gate, space, fault.page);
                    drop(gate);
                    if let Some(claim) = claim {
                        return self.swap_in(space, &claim);
                    }
                }
            }
        }
        // The states change under us: the thread looks again itself.
        wake(space, fault.page, 1);
        Served::Done
    }

    /// A forked child learns the number of its address space.
    fn answer_beacon(&self, space: &AddressSpace, page: VirtualPage) -> Served {
        let Ok(_gate) = space.shared() else {
            return Served::Done;
        };
        match copy(space, page, &space.beacon_page(), 1) {
            Ok(()) => Served::Done,
            Err(Partial {
                errno: Errno::EEXIST,
                ..
            }) => {
                wake(space, page, 1);
                Served::Done
            }
            Err(partial) => after_failure(space, page, partial.errno),
        }
    }

    /// Puts a staged page back that is not to go out now.
    pub fn put_back(&mut self, space: &AddressSpace, page: VirtualPage, place: StageIndex) {
        let Ok(gate) = space.shared() else {
            return;
        };
        let entry = gate.table().entry(page);
        if entry.replace(PageState::Staged(place), PageState::Returning(place))
            && self.bring_back(&gate, space, page, place) == Served::Retry
        {
            // Whoever asked for it meanwhile was told to wait for it, and asks again.
            wake(space, page, 1);
        }
    }

    /// A staged page, which is `Returning`, comes back by copy. The helper could move it back, but a
    /// switch to the helper's thread costs more than the copy of a page.
    fn bring_back(
        &mut self,
        gate: &Shared<'_>,
        space: &AddressSpace,
        page: VirtualPage,
        place: StageIndex,
    ) -> Served {
        let entry = gate.table().entry(page);
        let returning = PageState::Returning(place);
        let staged = PageState::Staged(place);
        let Some(attached) = space.attached() else {
            entry.replace(returning, staged);
            return Served::Done;
        };
        let buffer = &mut self.buffer[0];
        let read = attached
            .inspector
            .read_pages(&[space.stage_address(place)], buffer);
        if !matches!(read, Ok(1)) {
            // Only a dying program's memory cannot be read.
            entry.replace(returning, staged);
            wake(space, page, 1);
            std::thread::sleep(Duration::from_micros(100));
            return Served::Done;
        }
        match copy(space, page, buffer, 1) {
            Ok(()) => {
                space.add_resident_pages(1);
                entry.replace(returning, PageState::HOT);
                lock(&space.stage).retire(place);
                Served::Done
            }
            Err(Partial {
                errno: Errno::EEXIST,
                ..
            }) => {
                entry.replace(returning, PageState::FRESH);
                lock(&space.stage).retire(place);
                wake(space, page, 1);
                Served::Done
            }
            Err(partial) => {
                entry.replace(returning, staged);
                after_failure(space, page, partial.errno)
            }
        }
    }
}

/// First touch: pages of zeros. `None` if the page's state is another by now.
fn fill_zeros(
    gate: &Shared<'_>,
    space: &AddressSpace,
    fault: Fault,
    admission: Admission,
) -> Option<Served> {
    let claimed = claim_holes(gate, space, fault.page, admission);
    let pages = claimed.len() as u64;
    if pages == 0 {
        return None;
    }
    // Writers get memory at once, in windows too; a lone reader gets the shared zero page.
    let owned = fault.write || pages > 1;
    let mut result = if owned {
        copy(space, fault.page, &ZEROS, pages)
    } else {
        space.uffd().zero(fault.page.address(), bytes(1))
    };
    if pages > 1
        && matches!(
            result,
            Err(Partial {
                done: 0,
                errno: Errno::ENOENT
            })
        )
    {
        // The window crosses into another mapping: the first page alone may still do.
        result = copy(space, fault.page, &ZEROS, 1).and(Err(Partial {
            done: bytes(1),
            errno: Errno::ENOENT,
        }));
    }
    let done = match &result {
        Ok(()) => pages,
        Err(partial) => partial.done / PAGE_SIZE as u64,
    };
    if owned {
        space.add_resident_pages(done as i64);
    }
    if done > 0 && was_known_to_be_there(space, claimed[0]) {
        space.group().note_zeroed(space, fault.page);
    }
    space
        .group()
        .counters
        .faults_zero_fill
        .fetch_add(1, Ordering::Relaxed);
    let errno = result.err().map(|partial| partial.errno);
    let present = errno == Some(Errno::EEXIST);
    for (step, before) in (0..).zip(&claimed) {
        let entry = gate.table().entry(fault.page.plus(step));
        let after = if step < done && !stays_removed(*before, admission) {
            PageState::FRESH
        } else if present && step == done && *before == PageState::Hole {
            // It is there already and was never known.
            PageState::FRESH
        } else {
            *before
        };
        entry.replace(PageState::Clearing, after);
    }
    if done < pages {
        // Whoever faulted on the rest of the window meanwhile was told to wait for it.
        wake(space, fault.page.plus(done), pages - done);
    }
    Some(match errno {
        Some(errno) if done == 0 && !present => after_failure(space, fault.page, errno),
        _ => Served::Done,
    })
}

/// The program locked all its memory, which brings the stage in with the rest. It gets zeros, which are
/// dropped by the next command, and waits for nothing.
fn fill_stage(space: &AddressSpace, page: VirtualPage, place: StageIndex) -> Served {
    let Ok(_gate) = space.shared() else {
        return Served::Done;
    };
    let pages = lock(&space.stage).empty_from(place, ZERO_WINDOW).max(1);
    let (done, errno) = match copy(space, page, &ZEROS, u64::from(pages)) {
        Ok(()) => (pages, None),
        Err(partial) => (partial.done as u32 / PAGE_SIZE as u32, Some(partial.errno)),
    };
    lock(&space.stage).filled(place, done);
    space.add_resident_pages(i64::from(done));
    match errno {
        Some(Errno::EEXIST) if done == 0 => {
            wake(space, page, 1);
            Served::Done
        }
        Some(errno) if done == 0 => after_failure(space, page, errno),
        _ => Served::Done,
    }
}

/// The helper may come to pages of which `madvise` said that they go, and which are about to.
fn stays_removed(state: PageState, admission: Admission) -> bool {
    admission == Admission::OfHelper && matches!(state, PageState::Removed(_))
}

fn was_known_to_be_there(space: &AddressSpace, state: PageState) -> bool {
    match state {
        // Of these, what a fork wiped was not told apart.
        PageState::Resident { shared: true, .. } => !space.uncompared.load(Ordering::Relaxed),
        PageState::Resident { shared: false, .. } => true,
        _ => false,
    }
}

/// Claims the page, missing as it is, and as many behind it as the window advises: holes, and what was
/// dropped together with the page, which is over, as the program goes on here. Returns their states
/// before.
fn claim_holes(
    gate: &Shared<'_>,
    space: &AddressSpace,
    page: VirtualPage,
    admission: Admission,
) -> Vec<PageState> {
    let entry = gate.table().entry(page);
    let state = entry.load();
    let known = matches!(
        state,
        PageState::Hole | PageState::Removed(_) | PageState::Resident { .. }
    );
    if !known || !entry.replace(state, PageState::Clearing) {
        return Vec::new();
    }
    let mut claimed = vec![state];
    if matches!(state, PageState::Resident { .. }) || stays_removed(state, admission) {
        return claimed;
    }
    let advised = lock(&space.windows).first_touch(page, ZERO_WINDOW);
    if advised > 1 {
        let room = (room_pages(space) / 2).max(1);
        let range = space.clip(
            page,
            PageRange {
                start: page,
                end: page.plus(u64::from(advised).min(room)),
            },
        );
        for step in 1..range.pages() {
            let entry = gate.table().entry(page.plus(step));
            let next = entry.load();
            let alike = next == PageState::Hole || next == state;
            if !alike || !entry.replace(next, PageState::Clearing) {
                break;
            }
            claimed.push(next);
        }
    } else {
        // Notes a fault outside of what is known to be managed.
        space.is_managed(page);
    }
    claimed
}

/// Copies pages in and wakes who waits for them.
pub fn copy(
    space: &AddressSpace,
    page: VirtualPage,
    source: &[u8],
    pages: u64,
) -> Result<(), Partial> {
    space.uffd().copy_in(page.address(), source, bytes(pages))
}

/// Wakes whoever waits for the pages, to fault again or run on.
pub fn wake(space: &AddressSpace, page: VirtualPage, pages: u64) {
    // Fails only if the address space is gone, and its threads with it.
    let _ = space.uffd().wake(page.address(), bytes(pages));
}

pub fn after_failure(space: &AddressSpace, page: VirtualPage, errno: Errno) -> Served {
    match errno {
        Errno::EAGAIN => Served::Retry,
        Errno::ESRCH => {
            space.set_dead();
            Served::Done
        }
        Errno::ENOENT => {
            // Unmapped, or not ours any more: the event is on its way.
            wake(space, page, 1);
            Served::Done
        }
        _ => {
            // No memory, say: the thread tries again, but not at once.
            space
                .group()
                .counters
                .errors
                .fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(200));
            wake(space, page, 1);
            Served::Done
        }
    }
}

fn room_pages(space: &AddressSpace) -> u64 {
    let group = space.group();
    group
        .resident_limit_bytes()
        .saturating_sub(group.resident_bytes())
        / PAGE_SIZE as u64
}

/// Whether there is no room for a page; calls the reclaimer where there is little. There is for a
/// stopped program, and for one that stops another: see `halt.rs`.
fn full(space: &AddressSpace) -> bool {
    let room = room_pages(space);
    if room < WINDOW_ROOM_PAGES {
        space.group().press_reclaimer();
    }
    room == 0 && !space.is_still_halted() && !space.is_spared()
}

/// Whether a fault is to wait for room; if so, it is listed, and served later.
pub fn must_wait(space: &Arc<AddressSpace>, fault: Fault, admission: Admission) -> bool {
    admission == Admission::MayDefer && full(space) && {
        let waits = space.group().deferred.add(space, fault);
        space.group().press_reclaimer();
        waits
    }
}

/// A stored page cannot be had any more: the program must not run on with other bytes.
pub fn stop_program(space: &AddressSpace, page: VirtualPage, error: &dyn std::fmt::Display) {
    space.stop_program(&format!(
        "a stored page (address {:#x}) cannot be read back, and it must not be given wrong data: {error}",
        page.address()
    ));
}
