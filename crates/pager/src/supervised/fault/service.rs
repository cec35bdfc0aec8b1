//! Per-thread state of fault service.

use crate::bugs::Bug;
use crate::supervised::fault::claim::{Claim, SWAP_IN_WINDOW};
use crate::supervised::fault::message::Resolution;
use crate::supervised::group::Group;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Shared;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::page_buffer::PageBuffer;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Buffers of one thread that serves faults: a handler, the governor, the reclaimer or one of its crew.
pub(crate) struct FaultService {
    /// The group whose faults the thread serves.
    pub group: Arc<Group>,
    /// Decompressed pages before they are copied in.
    pub buffer: PageBuffer,
    /// Workspace for decompression.
    pub scratch: Scratch,
    /// The last fault was a first touch.
    pub first_touch: bool,
    /// The thread may wait for other machines: no other fault waits for it.
    pub waits: bool,
    /// Longest wait for a program's gate, of a thread that all programs need. Longer delays other programs
    /// behind one whose events take long to read; shorter leaves its faults to a later look more often.
    patience: Option<Duration>,
    /// Loaded pages whose program's gate was not available within `patience`.
    pub unfinished: UnfinishedLoads,
}

/// What a thread has loaded and not copied in yet. Abandoned when the thread ends.
#[derive(Default)]
pub(crate) struct UnfinishedLoads(pub Vec<UnfinishedLoad>);

/// Claimed pages that are loaded and not copied in yet.
pub(crate) struct UnfinishedLoad {
    /// The address space.
    pub space: Arc<AddressSpace>,
    /// The claimed pages.
    pub claim: Claim,
    /// Which of them were loaded.
    pub loaded: Range<usize>,
    /// Their contents.
    pub contents: Vec<Page>,
}

impl FaultService {
    /// Buffers for one thread, made before it starts: they need a mapping, which may fail.
    pub(crate) fn new(group: Arc<Group>) -> io::Result<FaultService> {
        Ok(FaultService {
            group,
            buffer: PageBuffer::new(SWAP_IN_WINDOW as usize)?,
            scratch: Scratch::for_loads(),
            first_touch: false,
            waits: false,
            patience: None,
            unfinished: UnfinishedLoads::default(),
        })
    }

    /// The same for a thread that all programs need, which waits for the gate of none for longer than
    /// `patience`.
    pub(crate) fn with_patience(group: Arc<Group>, patience: Duration) -> io::Result<FaultService> {
        Ok(FaultService {
            patience: Some(patience),
            ..FaultService::new(group)?
        })
    }

    /// The same for a thread that may wait for other machines.
    pub(crate) fn that_waits(group: Arc<Group>) -> io::Result<FaultService> {
        Ok(FaultService {
            waits: true,
            ..FaultService::new(group)?
        })
    }

    /// Whether this thread must leave a page to one that may wait for other machines.
    pub(crate) fn must_leave(&self, slot: Slot) -> bool {
        !self.waits && self.group.remote.is_some() && self.group.resources.swap.may_wait(slot)
    }

    /// Enters the shared gate to serve a fault. Otherwise returns how the service ends: `Done` if the
    /// address space is gone, or `GateMissed`.
    pub(crate) fn enter<'a>(&self, space: &'a AddressSpace) -> Result<Shared<'a>, Resolution> {
        let Some(patience) = self.patience else {
            return space.shared().map_err(|_| Resolution::Done);
        };
        if Bug::GateEnteredTwice.is_back()
            && !space.was_gate_missed()
            && space.shared_within(patience).is_ok()
        {
            return space.shared().map_err(|_| Resolution::Done);
        }
        let entered = if space.was_gate_missed() {
            space.try_shared()
        } else {
            space.shared_within(patience).ok()
        };
        entered.ok_or_else(|| {
            if space.is_dead_or_gone() {
                return Resolution::Done;
            }
            space.note_gate_missed();
            Resolution::GateMissed
        })
    }

    /// Whether loaded pages wait for a gate.
    pub(crate) fn has_unfinished(&self) -> bool {
        !self.unfinished.0.is_empty()
    }
}

impl Drop for UnfinishedLoads {
    fn drop(&mut self) {
        for load in &self.0 {
            load.claim.abandon(&load.space);
        }
    }
}
