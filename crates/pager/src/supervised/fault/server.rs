//! Per-thread state of fault service.

use crate::supervised::group::Group;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::sync::Arc;

/// Maximum number of pages swapped in by one fault. Larger windows save faults and delay the faulting
/// thread.
pub const SWAP_IN_WINDOW: u32 = 16;

/// Buffers of one thread that serves faults: a handler, the governor or the reclaimer.
pub struct Server {
    /// The group whose faults the thread serves.
    pub group: Arc<Group>,
    /// Decompressed pages before they are copied in.
    pub buffer: Vec<Page>,
    /// Workspace for decompression.
    pub scratch: Scratch,
    /// The last fault was a first touch.
    pub first_touch: bool,
    /// The thread may wait for other machines: no other fault waits for it.
    pub waits: bool,
}

impl Server {
    /// Buffers for one thread.
    pub fn new(group: Arc<Group>) -> Server {
        Server {
            group,
            buffer: vec![[0; PAGE_SIZE]; SWAP_IN_WINDOW as usize],
            scratch: Scratch::for_loads(),
            first_touch: false,
            waits: false,
        }
    }

    /// The same for a thread that may wait for other machines.
    pub fn that_waits(group: Arc<Group>) -> Server {
        Server {
            waits: true,
            ..Server::new(group)
        }
    }

    /// Whether this thread must leave a page to one that may wait for other machines.
    pub fn must_leave(&self, slot: Slot) -> bool {
        !self.waits && self.group.remote.is_some() && self.group.resources.swap.may_wait(slot)
    }
}
