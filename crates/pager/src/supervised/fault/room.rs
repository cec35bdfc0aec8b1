//! Room under the limit: whether a fault is served now or waits for reclaim.

use crate::supervised::fault::message::{Admission, Fault};
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use memfold_sys::PAGE_SIZE;
use std::sync::Arc;

/// Room, in pages, below which a fault wakes the reclaimer. A larger value starts reclaim earlier.
const LOW_ROOM_PAGES: u64 = 64;

/// Pages that may become resident before the group is at its limit.
pub(crate) fn room_pages(space: &AddressSpace) -> u64 {
    let resources = &space.resources;
    resources
        .resident_limit_bytes()
        .saturating_sub(resources.resident_bytes())
        / PAGE_SIZE as u64
}

/// Whether there is no room for a page; wakes the reclaimer if there is little. Stopped programs and
/// spared tracers never wait for room (`space/stopped.rs`).
fn is_full(space: &AddressSpace) -> bool {
    let room = room_pages(space);
    if room < LOW_ROOM_PAGES {
        space.resources.wake_reclaimer_under_pressure();
    }
    room == 0 && !space.is_stopped() && !space.is_spared()
}

/// Whether a fault must wait for room. If so, it is deferred, and the reclaimer serves it later.
pub(crate) fn must_wait(
    group: &Group,
    space: &Arc<AddressSpace>,
    fault: Fault,
    admission: Admission,
) -> bool {
    admission == Admission::MayDefer && is_full(space) && {
        let waits = group.deferred.add(space, fault);
        space.resources.wake_reclaimer_under_pressure();
        waits
    }
}
