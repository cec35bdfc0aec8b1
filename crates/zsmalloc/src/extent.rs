//! Extents: the parts of a pool's address range that shards own, and their blocks, which huge pages
//! may back.
//!
//! The arenas of an extent belong to one shard and may have any run length. An extent is divided
//! into *blocks* of the source's huge page size, or is one block without huge pages. A block
//! becomes resident page by page or, if no page of it is resident, as one huge page. Splitting a
//! huge page costs as much as discarding all of it in base pages, so it is done only where much of
//! it is free.
//!
//! Residency and use are recorded for each page. A run that spans two blocks may be resident in one
//! only.

use std::ops::Range;

use crate::{
    geometry::UNIT_PAGES,
    pages::{SharedPageSet, UnitBits},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    table::Zero,
};

/// Links of lists of extents: the index plus one, the end of a list, or on no list.
pub(crate) const END: u32 = u32::MAX;
pub(crate) const NOT_LISTED: u32 = 0;

/// An extent. Guarded by the lock of its owner's run lists, so relaxed accesses suffice;
/// statistics, and checks whether to take the lock, read it without.
#[derive(Debug)]
pub(crate) struct Extent {
    /// The shard, plus one; zero before the extent is in use.
    owner: AtomicU32,
    /// Units assigned to arenas.
    assigned: AtomicU32,
    /// Pages of runs in use.
    pub(crate) used: SharedPageSet,
    /// Pages that are resident, or about to be committed.
    pub(crate) resident: SharedPageSet,
    /// Units in huge pages, a bit each.
    huge: AtomicU32,
    /// A thread is populating or discarding memory of it, or adding an arena; no other thread does
    /// any of these meanwhile. Runs are still taken and freed.
    busy: AtomicBool,
    /// Link in the list of extents with memory to discard.
    pub(crate) next_warm: AtomicU32,
    /// Link in the list of extents with room for arenas.
    pub(crate) next_open: AtomicU32,
}

// SAFETY: it consists of atomic integers and booleans, for which zero bytes are valid, and has no
// drop.
unsafe impl Zero for Extent {
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

/// Free resident pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Free {
    /// Pages that can be discarded as they are: base pages, or huge pages not in use.
    pub(crate) giving: usize,
    /// Pages of huge pages that are partly in use.
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

impl Extent {
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
        let after = if huge {
            before | units as u32
        } else {
            before & !(units as u32)
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

    /// Whether no page of a block is resident.
    pub(crate) fn is_cold(&self, block: &Range<usize>) -> bool {
        block.clone().all(|unit| self.resident.unit(unit) == 0)
    }

    /// Whether a block's free pages cannot be discarded without a split.
    pub(crate) fn keeps_spare(&self, block: &Range<usize>) -> bool {
        self.is_huge(block) && self.is_used(block)
    }

    /// The free resident pages of a unit.
    pub(crate) fn free_in(&self, unit: usize) -> UnitBits {
        self.resident.unit(unit) & !self.used.unit(unit)
    }

    /// The free resident pages of a block.
    pub(crate) fn free(&self, block: &Range<usize>) -> Free {
        let pages = |unit| self.free_in(unit).count_ones() as usize;
        let pages = block.clone().map(pages).sum();
        if self.keeps_spare(block) {
            Free::spare(pages)
        } else {
            Free::giving(pages)
        }
    }
}
