//! Serving a page fault: from its page state to the file that handles that state.
//!
//! | page state | file |
//! |---|---|
//! | swapped | `swap_in` |
//! | staged | `stage_return` |
//! | hole, removed, resident (and missing) | `zero_fill` |
//! | write-protected since a fork | `cow` |
//!
//! A fault waits only for a batch that contains its page. Service ends in one of four ways: the page is
//! copied in, which wakes the thread; the thread is woken to fault again; the fault is deferred until
//! there is room; or it is served again, after pending events were read (the kernel answered EAGAIN) or
//! when the gate is available.

use crate::page::VirtualPage;
use crate::page_state::PageState;
use crate::supervised::fault::claim::Claim;
use crate::supervised::fault::cow::admit_write;
use crate::supervised::fault::message::{Admission, Fault, Resolution};
use crate::supervised::fault::primitives::{after_failure, wake};
use crate::supervised::fault::room::must_wait;
use crate::supervised::fault::service::FaultService;
use crate::supervised::fault::zero_fill::{fill_stage, fill_zeros};
use crate::supervised::kernel::Memory;
use crate::supervised::reclaim::batch::Batch;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::uffd::Partial;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Number of tries for a page whose state keeps changing, before its thread is woken to fault again.
const TRIES: u32 = 4;
/// Longest wait for the helper, per try, of a fault on a page of the batch in flight. Longer blocks the
/// handler for the other faults on its CPU.
const BATCH_PATIENCE: Duration = Duration::from_micros(300);

impl FaultService {
    /// Serves one fault.
    pub(crate) fn serve(
        &mut self,
        space: &Arc<AddressSpace>,
        fault: Fault,
        admission: Admission,
    ) -> Resolution {
        self.first_touch = false;
        if let Some(outcome) = self.serve_special(space, fault, admission) {
            return outcome;
        }
        for _ in 0..TRIES {
            let gate = match self.enter(space) {
                Ok(gate) => gate,
                Err(outcome) => return outcome,
            };
            let entry = gate.table().entry(fault.page);
            let state = entry.load();
            match state {
                PageState::Moving(_) => {
                    if Batch::settle(space, &gate).is_some() {
                        continue;
                    }
                    let posted = lock(&space.helper_port).posted();
                    drop(gate);
                    if space.resources.carries() && space.awaits_read() {
                        return Resolution::Retry;
                    }
                    space.channel.wait_done(posted, BATCH_PATIENCE);
                }
                PageState::Staged(place) => {
                    if entry.replace(state, PageState::Returning(place)) {
                        let counters = &space.resources.counters;
                        counters.faults_cache.fetch_add(1, Ordering::Relaxed);
                        return self.return_from_stage(&gate, space, fault.page, place);
                    }
                }
                // The claiming thread wakes this one.
                PageState::Returning(_) | PageState::Filling(..) | PageState::Clearing => {
                    return Resolution::Done;
                }
                PageState::Hole | PageState::Removed(_) | PageState::Resident { .. } => {
                    if fault.is_outdated(space) {
                        // If unregistering did not wake the thread, this does: it faults again.
                        wake(space, fault.page, 1);
                        return Resolution::Done;
                    }
                    self.first_touch = true;
                    // A resident page was most likely brought in meanwhile, and needs no room.
                    let needs_room = !matches!(state, PageState::Resident { .. });
                    if needs_room && must_wait(&self.group, space, fault, admission) {
                        return Resolution::Queued;
                    }
                    if let Some(outcome) = fill_zeros(&gate, space, fault, admission) {
                        return outcome;
                    }
                }
                PageState::Swapped(slot, _) => {
                    if must_wait(&self.group, space, fault, admission) {
                        return Resolution::Queued;
                    }
                    if self.must_leave(slot)
                        && let Some(remote) = &self.group.remote
                    {
                        remote.faults.push(space, fault);
                        return Resolution::Queued;
                    }
                    let claim = Claim::make(&gate, space, fault.page);
                    drop(gate);
                    if let Some(claim) = claim {
                        return self.swap_in(space, claim);
                    }
                }
            }
        }
        // The page keeps changing state: the thread faults again.
        wake(space, fault.page, 1);
        Resolution::Done
    }

    /// Serves faults that do not depend on the page state: on a forked child's beacon, on the stage,
    /// and writes to write-protected pages. `None` for all others.
    fn serve_special(
        &self,
        space: &Arc<AddressSpace>,
        fault: Fault,
        admission: Admission,
    ) -> Option<Resolution> {
        if space.is_fork_request(fault.page) {
            // Only a handler answers it: the thread faults again.
            wake(space, fault.page, 1);
            return Some(Resolution::Done);
        }
        let is_id_request = space.is_id_request(fault.page);
        let place = space.place_at(fault.page);
        if !is_id_request && place.is_none() && !fault.protected {
            return None;
        }
        let gate = match self.enter(space) {
            Ok(gate) => gate,
            Err(outcome) => return Some(outcome),
        };
        Some(if is_id_request {
            answer_id_request(&gate, space, fault.page)
        } else if let Some(place) = place {
            fill_stage(&gate, space, fault.page, place)
        } else {
            admit_write(&self.group, &gate, space, fault, admission)
        })
    }
}

/// Serves a forked child's read of its ID.
fn answer_id_request(gate: &Shared<'_>, space: &AddressSpace, page: VirtualPage) -> Resolution {
    debug_assert!(gate.is_of(space));
    match space.uffd().copy_in(page, &space.beacon_page(), 1) {
        Ok(()) => Resolution::Done,
        Err(Partial {
            errno: Errno::EEXIST,
            ..
        }) => {
            wake(space, page, 1);
            Resolution::Done
        }
        Err(partial) => after_failure(space, page, partial.errno),
    }
}
