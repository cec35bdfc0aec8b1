//! Stretches: what the pool's address range is handed out in, and what huge pages back.
//!
//! A stretch belongs to one shard, whose arenas lie in it, of any length of zspage. It is as long
//! as the source's huge page, if the source has any. Its memory comes and goes in small pages, or
//! all of it at once as one huge page: for that no zspage may be in it. A huge page can be split,
//! which costs as much as giving back a thousand small ones: done only where much of it is free.

use crate::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    table::Zero,
};

/// A list of stretches through their records, as index plus one; the end of one; and what the link
/// of a stretch says that is on none.
pub(crate) const END: u32 = u32::MAX;
pub(crate) const NOT_LISTED: u32 = 0;

/// One stretch. Guarded by the lock of its owner's run lists, so relaxed accesses do.
#[derive(Debug)]
pub(crate) struct Stretch {
    /// The shard, plus one; zero before the stretch is in use.
    owner: AtomicU32,
    /// Pages of its runs that were taken.
    used: AtomicU32,
    /// Other pages of it that have memory.
    warm: AtomicU32,
    /// Units that arenas were given.
    assigned: AtomicU32,
    huge: AtomicBool,
    /// Somebody is about to change what backs it, or puts an arena into it; nobody else does
    /// either meanwhile, nor gives back memory of it. Runs come and go.
    busy: AtomicBool,
    /// The list of stretches with memory to give back.
    pub(crate) next_warm: AtomicU32,
    /// The list of stretches with room for arenas.
    pub(crate) next_open: AtomicU32,
}

// SAFETY: it is made of atomic integers and booleans, for which zero bytes are valid, and has no
// drop.
unsafe impl Zero for Stretch {
    fn zero() -> Self {
        Self {
            owner: AtomicU32::new(0),
            used: AtomicU32::new(0),
            warm: AtomicU32::new(0),
            assigned: AtomicU32::new(0),
            huge: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            next_warm: AtomicU32::new(NOT_LISTED),
            next_open: AtomicU32::new(NOT_LISTED),
        }
    }
}

impl Stretch {
    /// The shard it belongs to, if it is in use.
    pub(crate) fn owner(&self) -> Option<usize> {
        (self.owner.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    pub(crate) fn set_owner(&self, shard: usize) {
        self.owner.store(shard as u32 + 1, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn set_used(&self, pages: usize) {
        self.used.store(pages as u32, Ordering::Relaxed);
    }

    pub(crate) fn warm(&self) -> usize {
        self.warm.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn set_warm(&self, pages: usize) {
        self.warm.store(pages as u32, Ordering::Relaxed);
    }

    pub(crate) fn is_huge(&self) -> bool {
        self.huge.load(Ordering::Relaxed)
    }

    pub(crate) fn set_huge(&self, huge: bool) {
        self.huge.store(huge, Ordering::Relaxed);
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    pub(crate) fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }

    pub(crate) fn assigned(&self) -> usize {
        self.assigned.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn set_assigned(&self, units: usize) {
        self.assigned.store(units as u32, Ordering::Relaxed);
    }

    /// Whether a part of it is in use, so that its free pages stay as long as it is huge.
    pub(crate) fn keeps_spare(&self) -> bool {
        self.is_huge() && self.used() > 0
    }
}
