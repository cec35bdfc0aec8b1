//! Room under the limit: whether a fault is served now or waits for reclaim.

use crate::supervised::fault::message::{Admission, Fault};
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
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

/// Pages that are charged before they are filled, so that handlers of other programs see the room taken.
pub(crate) struct Charged<'a> {
    space: &'a AddressSpace,
    pages: u64,
}

impl<'a> Charged<'a> {
    /// Charges pages that are about to be filled.
    pub(crate) fn new(space: &'a AddressSpace, pages: u64) -> Charged<'a> {
        space.begin_filling(pages);
        Charged { space, pages }
    }

    /// Charges a window of at most `pages`, and of half of the room; at least one page, for the fault.
    pub(crate) fn window(space: &'a AddressSpace, pages: u64) -> Charged<'a> {
        // No two handlers take the same room.
        let _turn = lock(&space.resources.window_turn);
        Charged::new(space, pages.min(room_pages(space) / 2).max(1))
    }

    /// Number of charged pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Gives back the charge of all but `pages`.
    pub(crate) fn lower_to(&mut self, pages: u64) {
        let less = self.pages.saturating_sub(pages);
        self.space.end_filling(less, 0);
        self.pages -= less;
    }

    /// Ends with `done` pages filled.
    pub(crate) fn end(mut self, done: u64) {
        self.space.end_filling(self.pages, done);
        self.pages = 0;
    }
}

impl Drop for Charged<'_> {
    fn drop(&mut self) {
        self.space.end_filling(self.pages, 0);
    }
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
