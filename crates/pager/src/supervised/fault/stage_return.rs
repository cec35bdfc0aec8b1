//! Returning staged pages: on a fault (swap-cache hit), and putback by the reclaimer.

use crate::page::VirtualPage;
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::message::Resolution;
use crate::supervised::fault::primitives::{after_failure, copy, wake};
use crate::supervised::fault::room::Charged;
use crate::supervised::fault::service::FaultService;
use crate::supervised::kernel::Process;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::uffd::Partial;
use std::time::Duration;

impl FaultService {
    /// Puts a staged page back into the program's memory. It stays staged if the gate is missed.
    pub(crate) fn putback(&mut self, space: &AddressSpace, page: VirtualPage, place: StageIndex) {
        let Ok(gate) = self.enter(space) else {
            return;
        };
        let entry = gate.table().entry(page);
        if entry.replace(PageState::Staged(place), PageState::Returning(place))
            && self.return_from_stage(&gate, space, page, place) == Resolution::Retry
        {
            // A thread that faulted meanwhile waits for this page: it faults again.
            wake(space, page, 1);
        }
    }

    /// Copies a staged page, which is `Returning`, back. `UFFDIO_MOVE` would need a switch to the
    /// helper's thread, which costs more than copying a page.
    pub(crate) fn return_from_stage(
        &mut self,
        gate: &Shared<'_>,
        space: &AddressSpace,
        page: VirtualPage,
        place: StageIndex,
    ) -> Resolution {
        debug_assert!(gate.is_of(space));
        let entry = gate.table().entry(page);
        let returning = PageState::Returning(place);
        let staged = PageState::Staged(place);
        let Some(attached) = space.attached() else {
            entry.replace(returning, staged);
            return Resolution::Done;
        };
        let buffer = &mut self.buffer[0];
        let read = attached
            .inspector
            .copy_out(&[space.stage_address(place)], buffer);
        if !matches!(read, Ok(1)) {
            // Reading fails only if the program is exiting.
            entry.replace(returning, staged);
            wake(space, page, 1);
            crate::time::sleep(Duration::from_micros(100));
            return Resolution::Done;
        }
        let charged = Charged::new(space, 1);
        match copy(space, page, buffer, 1) {
            Ok(()) => {
                charged.end(1);
                entry.replace(returning, PageState::HOT);
                lock(&space.stage).retire(place);
                Resolution::Done
            }
            Err(Partial {
                errno: Errno::EEXIST,
                ..
            }) => {
                entry.replace(returning, PageState::FRESH);
                lock(&space.stage).retire(place);
                wake(space, page, 1);
                Resolution::Done
            }
            Err(partial) => {
                entry.replace(returning, staged);
                after_failure(space, page, partial.errno)
            }
        }
    }
}
