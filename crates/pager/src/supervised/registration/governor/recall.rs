//! Recall: bringing pages back that no fault asks for.

use super::{GATE_PATIENCE, Governor};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::fault::server::SWAP_IN_WINDOW;
use crate::supervised::fault::swap_in::Claim;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the governor does this before it looks at the programs' sizes again.
pub const SLICE: Duration = Duration::from_millis(4);
/// A page that does not come back by then, as its mapping changes, is left to a later pass.
const TRIES: u32 = 4;
/// Page states looked at before the clock is.
const LOOKED_AT: usize = 1 << 15;

/// Where a recall has come to.
#[derive(Debug, Default)]
pub struct Recalled {
    /// Where to go on; `None` at the end.
    pub next: Option<VirtualPage>,
    /// Some were left out, which others have or whose mapping changes.
    pub is_incomplete: bool,
}

enum Next {
    /// Nothing is out before this page, nor was it looked any further.
    Looked(VirtualPage),
    /// In the swap space, and claimed.
    Claimed(VirtualPage, Claim),
    Staged(VirtualPage, StageIndex),
    /// A handler brings it in.
    Awaited(VirtualPage),
}

impl Governor {
    /// Brings the pages of a range back until the deadline, and tells how many before they come. What is
    /// on its way to the stage is left to who calls.
    pub(super) fn recall(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        deadline: Instant,
        about_to_come: impl Fn(u64),
    ) -> Recalled {
        let mut recalled = Recalled::default();
        let (mut start, mut tries) = (range.start, 0);
        while start < range.end && !space.is_dead() {
            recalled.next = Some(start);
            if Instant::now() >= deadline {
                return recalled;
            }
            let rest = PageRange { start, ..range };
            let page = match find(space, rest) {
                None => return recalled,
                Some(Next::Looked(page)) => {
                    (start, tries) = (page, 0);
                    continue;
                }
                Some(Next::Claimed(page, claim)) => {
                    about_to_come(claim.pages() as u64);
                    self.server.swap_in(space, &claim);
                    page
                }
                Some(Next::Staged(page, place)) => {
                    // It was counted as resident while it was staged.
                    self.server.putback(space, page, place);
                    page
                }
                Some(Next::Awaited(page)) => {
                    std::thread::sleep(Duration::from_micros(50));
                    page
                }
            };
            tries = if page == start { tries + 1 } else { 1 };
            start = page;
            if tries > 1 {
                // Nothing is copied in before the events that are there have been read.
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

    /// Reads and applies what events there are; `false` if the gate cannot be had.
    pub(super) fn read_events(&mut self, space: &Arc<AddressSpace>) -> bool {
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            return space.take_over_gate();
        };
        let messages = self.handlers.read_messages(space, &mut gate);
        drop(gate);
        self.take_in(space, messages);
        true
    }
}

/// The first of a range that is out. `None` if the gate cannot be had, as the program is gone.
fn find(space: &AddressSpace, range: PageRange) -> Option<Next> {
    let gate = space.shared().ok()?;
    let mut found = Next::Looked(range.end);
    let mut looked = 0;
    gate.table().visit(range, |page, entry| {
        looked += 1;
        if looked > LOOKED_AT {
            found = Next::Looked(page);
            return false;
        }
        match entry.load() {
            PageState::Swapped(_) => {
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
            PageState::Hole
            | PageState::Removed(_)
            | PageState::Resident { .. }
            | PageState::Moving(_) => true,
        }
    });
    Some(found)
}
