//! Stretches: what the pool's address range is handed out in, and their blocks, which huge pages
//! back.
//!
//! A stretch belongs to one shard, whose arenas lie in it, of any length of zspage. It is cut into
//! *blocks*, each as long as the source's huge page, if the source has any; otherwise it is one.
//! The memory of a block comes and goes in small pages, or all of it at once as one huge page: for
//! that none of its pages may have memory. A huge page can be split, which costs as much as giving
//! back all of it in small ones: done only where much of it is free.
//!
//! Which pages have memory, and which are those of zspages, is known for each. A run that lies in
//! two blocks may have memory in one of them only.

use std::ops::Range;

use crate::{
    geometry::UNIT_PAGES,
    pages::{SharedPageSet, UnitBits},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    table::Zero,
};

/// A list of stretches through their records, as index plus one; the end of one; and what the link
/// of a stretch says that is on none.
pub(crate) const END: u32 = u32::MAX;
pub(crate) const NOT_LISTED: u32 = 0;

/// One stretch. Guarded by the lock of its owner's run lists, so relaxed accesses do; statistics, and
/// whoever looks whether taking the lock is worth it, read it without.
#[derive(Debug)]
pub(crate) struct Stretch {
    /// The shard, plus one; zero before the stretch is in use.
    owner: AtomicU32,
    /// Units that arenas were given.
    assigned: AtomicU32,
    /// Pages of runs that were taken.
    pub(crate) used: SharedPageSet,
    /// Pages that have memory, or are about to get it for the run they are of.
    pub(crate) resident: SharedPageSet,
    /// Units in huge pages, a bit each.
    huge: AtomicU32,
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
            assigned: AtomicU32::new(0),
            used: SharedPageSet::new(),
            resident: SharedPageSet::new(),
            huge: AtomicU32::new(0),
            busy: AtomicBool::new(false),
            next_warm: AtomicU32::new(NOT_LISTED),
            next_open: AtomicU32::new(NOT_LISTED),
        }
    }
}

/// Free pages that have memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Free {
    /// Those that can be given back as they are: in small pages, or in huge ones not in use.
    pub(crate) giving: usize,
    /// The others: those of huge pages of which a part is in use.
    pub(crate) spare: usize,
}

impl Free {
    pub(crate) const fn giving(pages: usize) -> Self {
        Self {
            giving: pages,
            spare: 0,
        }
    }

    pub(crate) const fn spare(pages: usize) -> Self {
        Self {
            giving: 0,
            spare: pages,
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

    /// Whether a block, named by its units, lies in a huge page.
    pub(crate) fn is_huge(&self, block: &Range<usize>) -> bool {
        self.huge.load(Ordering::Relaxed) & 1 << block.start != 0
    }

    pub(crate) fn set_huge(&self, block: &Range<usize>, huge: bool) {
        let units = ((1_u64 << block.len()) - 1) << block.start;
        let before = self.huge.load(Ordering::Relaxed);
        let after = match huge {
            true => before | units as u32,
            false => before & !(units as u32),
        };
        self.huge.store(after, Ordering::Relaxed);
    }

    /// Pages in huge pages.
    pub(crate) fn huge_pages(&self) -> usize {
        self.huge.load(Ordering::Relaxed).count_ones() as usize * UNIT_PAGES
    }

    /// Whether a page of a block is in use.
    pub(crate) fn is_used(&self, block: &Range<usize>) -> bool {
        block.clone().any(|unit| self.used.unit(unit) != 0)
    }

    /// Whether no page of a block has memory.
    pub(crate) fn is_cold(&self, block: &Range<usize>) -> bool {
        block.clone().all(|unit| self.resident.unit(unit) == 0)
    }

    /// Whether a block's free pages stay as long as it is huge.
    pub(crate) fn keeps_spare(&self, block: &Range<usize>) -> bool {
        self.is_huge(block) && self.is_used(block)
    }

    /// The free pages of a unit that have memory.
    pub(crate) fn free_in(&self, unit: usize) -> UnitBits {
        self.resident.unit(unit) & !self.used.unit(unit)
    }

    /// The free pages of a block that have memory.
    pub(crate) fn free(&self, block: &Range<usize>) -> Free {
        let pages = |unit| self.free_in(unit).count_ones() as usize;
        let pages = block.clone().map(pages).sum();
        match self.keeps_spare(block) {
            true => Free::spare(pages),
            false => Free::giving(pages),
        }
    }
}
