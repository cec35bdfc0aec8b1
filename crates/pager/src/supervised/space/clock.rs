//! The clock hand of an address space.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::replacement::Replacement;
use crate::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

/// The clock hand of an address space, and ranges that are paged out ahead of it. A round moves
/// the hand; other threads read it as a hint (Relaxed).
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// The page under the hand.
    pub hand: AtomicU64,
    /// Distance behind the hand, in pages, within which a page counts as evicted recently.
    pub recent: AtomicU64,
    /// Resident pages that the hand has met on its way round so far.
    pub met: AtomicU64,
    /// Those of its last way round.
    pub evictable: AtomicU64,
    /// Time of the program's last fault, in seconds since the supervisor's start.
    pub faulted: AtomicU32,
    /// Which pages leave first.
    pub replacement: Mutex<Replacement>,
    /// What came since the last round, where accesses are tracked.
    pub arrived: Mutex<RangeSet>,
    /// The last batch spared pages that were accessed, and has no victims: the next one takes them. Relaxed: set and read by
    /// the round.
    pub spared_all: AtomicBool,
    /// Credit in the proportional choice of an address space: grows by the evictable size, and the
    /// chosen address space pays the sum.
    pub credit: AtomicI64,
    /// Ranges whose COW the last command broke; they are the next victims.
    pub cow_broken: Mutex<Vec<PageRange>>,
    /// Ranges whose COW a relative broke to page out its copies. The originals stay resident until they
    /// are paged out here, too.
    pub sibling_ranges: Mutex<Vec<PageRange>>,
}

impl Clock {
    /// Whether the hand passed a page recently: if the page faults now, it refaults early. No eviction
    /// time is stored; the distance from the hand approximates the refault distance.
    pub(crate) fn refaults_early(&self, page: VirtualPage) -> bool {
        let hand = self.hand.load(Ordering::Relaxed);
        hand.wrapping_sub(page.0) <= self.recent.load(Ordering::Relaxed)
    }
}
