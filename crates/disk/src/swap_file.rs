//! The swap file of a disk, and the threads that wait while it is given up.

use crate::sync;
use memfold_swap::FileTier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The swap file of a disk.
#[derive(Debug)]
pub(crate) struct SwapFile {
    tier: Arc<FileTier>,
    /// Held by a swapoff.
    swapping_off: Mutex<()>,
    /// Swapoffs begun and ended: odd during one.
    changes: AtomicU64,
    /// Whether a swapoff is to stop, as the disk ends and writers wait for it.
    ends: AtomicBool,
}

impl SwapFile {
    pub(crate) fn new(tier: Arc<FileTier>) -> SwapFile {
        SwapFile {
            tier,
            swapping_off: Mutex::new(()),
            changes: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        }
    }

    /// Has a swapoff stop from now on, for which writers wait.
    pub(crate) fn end_waits(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Whether a swapoff is to stop.
    pub(crate) fn ends(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    /// A number that changes when a swapoff begins and ends.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Waits for the end of a swapoff. Whether there was one since `changes` was read: a file that
    /// refused blocks may take them again.
    pub(crate) fn waits_for_swap_off(&self, changes: u64) -> bool {
        drop(self.lock());
        self.changes() != changes
    }

    /// Keeps other swapoffs out.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        // It guards no data.
        sync::lock(&self.swapping_off)
    }

    /// Refuses blocks from now on, and has writers wait that need it. Whether it took blocks before.
    pub(crate) fn close(&self) -> bool {
        self.changes.fetch_add(1, Ordering::AcqRel);
        let was_open = !self.is_closed();
        self.tier.set_closed(true);
        was_open
    }

    /// Whether it takes no blocks.
    pub(crate) fn is_closed(&self) -> bool {
        self.tier.is_closed()
    }

    /// Has writers go on after [`close`](Self::close); with `reopen`, the file takes blocks again.
    pub(crate) fn end_closing(&self, reopen: bool) {
        if reopen {
            self.tier.set_closed(false);
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}
