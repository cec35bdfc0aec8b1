//! Where reclaim is in an address space.

use crate::page::{PageRange, VirtualPage};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The clock hand of an address space, and what goes out ahead of it.
#[derive(Debug, Default)]
pub struct Clock {
    /// The page at which the hand stands.
    pub hand: AtomicU64,
    /// Distance behind the hand, in pages, within which a page counts as evicted recently.
    pub recent: AtomicU64,
    /// For choosing the address space to reclaim from: grows with the resident size, is paid when chosen.
    pub credit: AtomicI64,
    /// Ranges whose COW was broken by the last command and that go out next.
    pub cow_broken: Mutex<Vec<PageRange>>,
    /// Ranges whose COW relatives broke to move them out: they go out here, too.
    pub sibling_ranges: Mutex<Vec<PageRange>>,
}

impl Clock {
    /// Whether the hand passed a page recently: if the page faults now, it refaults early. No eviction
    /// time is stored; the distance from the hand approximates the refault distance.
    pub fn refaults_early(&self, page: VirtualPage) -> bool {
        let hand = self.hand.load(Ordering::Relaxed);
        hand.wrapping_sub(page.0) <= self.recent.load(Ordering::Relaxed)
    }
}
