//! First touches: zero-filled pages, and pages of the stage that `mlockall` faults in.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::message::{Admission, Fault, Resolution};
use crate::supervised::fault::primitives::{after_failure, copy, wake};
use crate::supervised::fault::room::Charged;
use crate::supervised::kernel::Memory;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use crate::zeros::{ZERO_PAGES, ZEROS};
use memfold_sys::uffd::Partial;
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::atomic::Ordering;

/// Maximum number of zero-filled pages per fault. Larger windows save faults of sequential writers and
/// waste more memory of others.
pub(crate) const ZERO_WINDOW: u32 = 512;
const _: () = assert!(ZERO_WINDOW as usize <= ZERO_PAGES);

/// Fills the faulting page and its window with zeros. `None` if the page's state has changed.
pub(crate) fn fill_zeros(
    gate: &Shared<'_>,
    space: &AddressSpace,
    fault: Fault,
    admission: Admission,
) -> Option<Resolution> {
    let (claimed, window) = claim_holes(gate, space, fault.page, admission);
    let pages = claimed.len() as u64;
    if pages == 0 {
        return None;
    }
    // A write or a window gets private memory; a single read gets the shared zero page, where its first write can wait for room.
    let owned = fault.write || pages > 1 || space.resources.tracks_accesses();
    let charged = match window {
        Some(window) => window,
        None => Charged::new(space, u64::from(owned)),
    };
    let mut result = if owned {
        copy(space, fault.page, &ZEROS, pages)
    } else {
        let filled = space.uffd().zero(fault.page);
        space.protect_zeros(PageRange::around(fault.page, 1));
        filled
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
        // The window may cross into another mapping; the first page alone may still be copied.
        result = copy(space, fault.page, &ZEROS, 1).and(Err(Partial {
            done: bytes(1),
            errno: Errno::ENOENT,
        }));
    }
    let done = match &result {
        Ok(()) => pages,
        Err(partial) => partial.done / PAGE_SIZE as u64,
    };
    charged.end(if owned { done } else { 0 });
    space.note_arrived(PageRange {
        start: fault.page,
        end: fault.page.plus(done),
    });
    if done > 0 && was_known_resident(space, claimed[0]) {
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
            // The program has a page there that was not known.
            PageState::FRESH
        } else {
            *before
        };
        let claim = if Bug::ZerosWithoutClaim.is_back() && step == 0 {
            *before
        } else {
            PageState::Clearing
        };
        entry.replace(claim, after);
    }
    if done < pages {
        // Threads that faulted on the rest of the window meanwhile wait for this claim.
        wake(space, fault.page.plus(done), pages - done);
    }
    Some(match errno {
        Some(errno) if done == 0 && !present => after_failure(space, fault.page, errno),
        _ => Resolution::Done,
    })
}

/// Fills places of the stage with zeros: `mlockall` faults in the stage with all other memory, and must
/// not block. The next command drops these pages.
pub(crate) fn fill_stage(
    gate: &Shared<'_>,
    space: &AddressSpace,
    page: VirtualPage,
    place: StageIndex,
) -> Resolution {
    debug_assert!(gate.is_of(space));
    let pages = lock(&space.stage).empty_from(place, ZERO_WINDOW).max(1);
    let charged = Charged::new(space, u64::from(pages));
    let (done, errno) = match space.uffd().copy_in(page, &ZEROS, u64::from(pages)) {
        Ok(()) => (pages, None),
        Err(partial) => (partial.done as u32 / PAGE_SIZE as u32, Some(partial.errno)),
    };
    lock(&space.stage).filled(place, done);
    charged.end(u64::from(done));
    match errno {
        Some(Errno::EEXIST) if done == 0 => {
            wake(space, page, 1);
            Resolution::Done
        }
        Some(errno) if done == 0 => after_failure(space, page, errno),
        _ => Resolution::Done,
    }
}

/// Whether the page stays `Removed`: the helper's fault does not show that the `madvise` has returned,
/// so the kernel may still drop the page.
fn stays_removed(state: PageState, admission: Admission) -> bool {
    admission == Admission::OfHelper && matches!(state, PageState::Removed(_))
}

fn was_known_resident(space: &AddressSpace, state: PageState) -> bool {
    match state {
        // In a child that was not reconciled, the page may have been wiped by the fork.
        PageState::Resident { shared: true, .. } => !space.fork.uncompared.load(Ordering::Relaxed),
        PageState::Resident { shared: false, .. } => true,
        _ => false,
    }
}

/// Claims the page, missing as it is, and as many behind it as the window advises: holes, and what was
/// dropped together with the page, which is over, as the program goes on here. Returns their states
/// before, and the window's charge if it is larger than the page.
fn claim_holes<'a>(
    gate: &Shared<'_>,
    space: &'a AddressSpace,
    page: VirtualPage,
    admission: Admission,
) -> (Vec<PageState>, Option<Charged<'a>>) {
    let entry = gate.table().entry(page);
    let state = entry.load();
    let known = matches!(
        state,
        PageState::Hole | PageState::Removed(_) | PageState::Resident { .. }
    );
    let claim = if Bug::ZerosWithoutClaim.is_back() {
        state
    } else {
        PageState::Clearing
    };
    if !known || !entry.replace(state, claim) {
        return (Vec::new(), None);
    }
    let mut claimed = vec![state];
    if matches!(state, PageState::Resident { .. }) || stays_removed(state, admission) {
        return (claimed, None);
    }
    let advised = lock(&space.windows).first_touch(page, ZERO_WINDOW);
    let mut window = None;
    if advised > 1 {
        let mut charged = Charged::window(space, u64::from(advised));
        let end = page.plus(charged.pages());
        let range = space.clip(page, PageRange { start: page, end });
        for step in 1..range.pages() {
            let entry = gate.table().entry(page.plus(step));
            let next = entry.load();
            let alike = next == PageState::Hole || next == state;
            if !alike || !entry.replace(next, PageState::Clearing) {
                break;
            }
            claimed.push(next);
        }
        charged.lower_to(claimed.len() as u64);
        window = Some(charged);
    } else {
        // Requests a scan of the mappings if the page is not managed.
        space.is_managed(page);
    }
    (claimed, window)
}

/// Notes that a page that was known to be resident was missing and is filled with zeros; logs it once.
/// It is no loss if the kernel freed a `MADV_FREE` page or the page was under a guard region, neither
/// of which raises an event.
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
            "page {:#x} of the {kind} process {pid} was missing, although it should be resident, and now \
             reads as zeros: unless the program discarded it (MADV_FREE, MADV_GUARD_INSTALL), its data is \
             lost; please report this (reported once)",
            page.address()
        );
    }
}
