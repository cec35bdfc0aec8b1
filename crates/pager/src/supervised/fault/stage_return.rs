//! Staged pages that come back: a fault on a page in the swap cache, and putback by the reclaimer.

use crate::page::VirtualPage;
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::message::Served;
use crate::supervised::fault::primitives::{after_failure, copy, wake};
use crate::supervised::fault::server::Server;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::uffd::Partial;
use std::time::Duration;

impl Server {
    /// Puts a staged page back that is not to go out now.
    pub fn putback(&mut self, space: &AddressSpace, page: VirtualPage, place: StageIndex) {
        let Ok(gate) = space.shared() else {
            return;
        };
        let entry = gate.table().entry(page);
        if entry.replace(PageState::Staged(place), PageState::Returning(place))
            && self.return_from_stage(&gate, space, page, place) == Served::Retry
        {
            // Whoever asked for it meanwhile was told to wait for it, and asks again.
            wake(space, page, 1);
        }
    }

    /// A staged page, which is `Returning`, comes back by copy. The helper could move it back, but a
    /// switch to the helper's thread costs more than the copy of a page.
    pub fn return_from_stage(
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
