//! First touches: pages of zeros, and pages of the stage that `mlockall` asks for.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::message::{Admission, Fault, Served};
use crate::supervised::fault::primitives::{after_failure, copy, wake};
use crate::supervised::fault::room::room_pages;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use crate::zeros::{ZERO_PAGES, ZEROS};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::atomic::Ordering;

/// Pages of zeros brought in at once, at most.
pub const ZERO_WINDOW: u32 = 512;
const _: () = assert!(ZERO_WINDOW as usize <= ZERO_PAGES);

/// First touch: pages of zeros. `None` if the page's state is another by now.
pub fn fill_zeros(
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
        note_zeroed(space, fault.page);
    }
    space
        .resources
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
pub fn fill_stage(space: &AddressSpace, page: VirtualPage, place: StageIndex) -> Served {
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
        PageState::Resident { shared: true, .. } => !space.fork.uncompared.load(Ordering::Relaxed),
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

/// Notes that a page was not where it was known to be, and its program was given zeros; says so
/// once. The program may have given it up: memory that it freed lazily the kernel takes when the
/// host is short of it, and what lay under a guard region is gone; neither is told.
fn note_zeroed(space: &AddressSpace, page: VirtualPage) {
    space.resources.errors.fetch_add(1, Ordering::Relaxed);
    if !space.resources.warned_zeroed.swap(true, Ordering::Relaxed) {
        let pid = space.inspector().map_or(0, |inspector| inspector.pid());
        let kind = if space.fork.beacon().is_some() {
            "forked"
        } else {
            "executed"
        };
        log::error!(
            "a page ({:#x} of the {kind} process {pid}) was not in memory, where it was known to be, \
             and reads zeros now: if the program did not give it up (MADV_FREE, MADV_GUARD_INSTALL), \
             its contents are lost; please report that (this is said once)",
            page.address()
        );
    }
}
