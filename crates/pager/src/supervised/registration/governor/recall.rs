//! Recall: bringing back pages without a fault.

use super::{GATE_PATIENCE, Governor};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::claim::{Claim, SWAP_IN_WINDOW};
use crate::supervised::fault::message::Fault;
use crate::supervised::fault::service::FaultService;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use crate::time::Instant;
use std::sync::Arc;
use std::time::Duration;

/// Time after which a recall pauses for the governor's next sample. Longer recalls faster and delays
/// samples.
pub(super) const SLICE: Duration = Duration::from_millis(4);
/// Number of tries for a page whose mapping changes, before it is left to a later pass.
const TRIES: u32 = 4;
/// Page states visited between two checks of the deadline. More holds the gate for longer.
const LOOKED_AT: usize = 1 << 15;
/// Pause where too many pages on other machines are queued. Longer takes less CPU time, and lets the queue run empty.
const FULL: Duration = Duration::from_micros(500);

/// Progress of a recall.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// Where to continue; `None` at the end.
    pub next: Option<VirtualPage>,
    /// Some pages were skipped: a batch in flight or another thread has them, or their mapping changes. A batch may be
    /// settled as soon as its pages were skipped, so that it is over does not mean that they are back.
    pub is_incomplete: bool,
}

/// The first page of a range that is not resident.
enum Next {
    /// No page before this one is out, but for moving ones; later pages were not visited.
    Looked(VirtualPage),
    /// Swapped out, and claimed now.
    Claimed(VirtualPage, Claim),
    /// On another machine, for which this thread may not wait.
    Remote(VirtualPage),
    /// In the stage.
    Staged(VirtualPage, StageIndex),
    /// Claimed by another thread, which brings it in.
    Awaited(VirtualPage),
}

impl Governor {
    /// Brings the pages of a range back until the deadline. Pages of a batch in flight are skipped, and those on other
    /// machines left to the threads that wait for them.
    pub(super) fn recall(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        deadline: Instant,
    ) -> Recalled {
        let mut recalled = Recalled::default();
        let (mut start, mut tries) = (range.start, 0);
        while start < range.end && !space.is_dead() {
            recalled.next = Some(start);
            if Instant::now() >= deadline {
                return recalled;
            }
            let rest = PageRange { start, ..range };
            let page = match find(
                &self.messages.service,
                space,
                rest,
                &mut recalled.is_incomplete,
            ) {
                None => return recalled,
                Some(Next::Looked(page)) => {
                    (start, tries) = (page, 0);
                    continue;
                }
                Some(Next::Remote(page)) => {
                    (start, tries) = (page, 0);
                    if self.recall_remote(space, page) {
                        recalled.is_incomplete = true;
                        start = page.plus(1);
                    } else {
                        crate::time::sleep(FULL);
                    }
                    continue;
                }
                Some(Next::Claimed(page, claim)) => {
                    self.messages.service.swap_in(space, claim);
                    page
                }
                Some(Next::Staged(page, place)) => {
                    // A staged page counts as resident already.
                    self.messages.service.putback(space, page, place);
                    page
                }
                Some(Next::Awaited(page)) => {
                    crate::time::sleep(Duration::from_micros(50));
                    page
                }
            };
            tries = if page == start { tries + 1 } else { 1 };
            start = page;
            if tries > 1 {
                // The kernel refuses to copy pages in until pending events are read.
                self.read_events(space);
            }
            if tries > TRIES {
                recalled.is_incomplete = true;
                (start, tries) = (page.plus(1), 0);
            }
        }
        recalled.next = None;
        recalled
    }

    /// Queues a page on another machine. `false` if too many are queued.
    fn recall_remote(&self, space: &Arc<AddressSpace>, page: VirtualPage) -> bool {
        let remote = &self.group.remote;
        remote.as_ref().is_none_or(|remote| {
            let fault = Fault::of_recall(space, page);
            remote.faults.recall(space, fault)
        })
    }

    /// Reads and applies pending events. `false` if the gate is not available.
    pub(super) fn read_events(&mut self, space: &Arc<AddressSpace>) -> bool {
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            return space.take_over_gate();
        };
        let Some(messages) = self.messages.read_pending_events(space, &mut gate) else {
            return false;
        };
        drop(gate);
        self.messages.serve(space, messages);
        true
    }
}

/// Finds the first page of a range that is not resident, and claims it. `None` if the gate is not
/// available, or the program is gone. Notes whether moving pages were skipped.
fn find(
    service: &FaultService,
    space: &AddressSpace,
    range: PageRange,
    skips: &mut bool,
) -> Option<Next> {
    let gate = space.shared_within(GATE_PATIENCE).ok()?;
    let mut found = Next::Looked(range.end);
    let mut looked = 0;
    gate.table().visit(range, |page, entry| {
        looked += 1;
        if looked > LOOKED_AT {
            found = Next::Looked(page);
            return false;
        }
        match entry.load() {
            PageState::Swapped(slot, _) if service.must_leave(slot) => {
                found = Next::Remote(page);
                false
            }
            PageState::Swapped(..) => {
                let end = page.plus(u64::from(SWAP_IN_WINDOW)).min(range.end);
                let claim = Claim::of_range(space, &gate, PageRange { start: page, end });
                found = claim.map_or(Next::Awaited(page), |claim| Next::Claimed(page, claim));
                false
            }
            PageState::Staged(place) => {
                found = Next::Staged(page, place);
                false
            }
            PageState::Filling(..) | PageState::Returning(_) | PageState::Clearing => {
                found = Next::Awaited(page);
                false
            }
            PageState::Moving(_) => {
                *skips = true;
                true
            }
            PageState::Hole | PageState::Removed(_) | PageState::Resident { .. } => true,
        }
    });
    Some(found)
}
