//! What a thread that serves faults keeps from one to the next.

use crate::supervised::group::Group;
use memfold_swap::{Page, Scratch};
use memfold_sys::PAGE_SIZE;
use std::sync::Arc;

/// Pages brought in at once from the pool, at most.
pub const SWAP_IN_WINDOW: u32 = 16;

/// Buffers of a thread that serves faults.
pub struct Server {
    /// The group whose faults it serves.
    pub group: Arc<Group>,
    /// Pages on their way in.
    pub buffer: Vec<Page>,
    /// For decompression.
    pub scratch: Scratch,
}

impl Server {
    /// Buffers for one more thread.
    pub fn new(group: Arc<Group>) -> Server {
        Server {
            group,
            buffer: vec![[0; PAGE_SIZE]; SWAP_IN_WINDOW as usize],
            scratch: Scratch::for_loads(),
        }
    }
}
