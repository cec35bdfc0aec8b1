//! The state of one page, packed into an atomic word.
//!
//! ```text
//!            register, fill              plan a batch              helper moved it
//!   Hole ───────────────────► Resident ────────────────► Moving ───────────────────► Staged
//!    ▲ ▲                        ▲  ▲ ▲   not moved          │                        │   │
//!    │ │ unmap, remove          │  │ └─────────────────────-┘       touched again    │   │ stored
//!    │ └──── from any state     │  └────────── Returning ◄──────────────────────────-┘   │
//!    │                          │   copied back                                          ▼
//!    └── Removed                └───────────────── Filling ◄─────────────────────── Swapped
//!                                   copied in                 claimed by a fault
//! ```
//! Every change but those made while the gate is held exclusively is a compare-and-swap from the
//! state that was looked at, made while the gate is held shared.

use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering};

/// A place in the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageIndex(pub u32);

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// Nothing was ever there, or what was there is gone: a fault gets zeros.
    Hole,
    /// In the program's memory.
    Resident {
        /// How many times more the clock hand passes over it; [`MOST_SKIPS`] at most.
        skips: u8,
        /// Possibly shared with another process since a fork: it cannot be moved before the
        /// sharing is broken.
        shared: bool,
    },
    /// `madvise` dropped it, maybe not yet in fact: a fault gets zeros, and reclaim keeps away
    /// for a while, or it could carry off the old contents before the kernel drops them. So are all
    /// pages of what is dropped that were there, wherever they were, and the first in any case.
    Removed(Removal),
    /// In a batch that the helper is moving to this place of the stage.
    Moving(StageIndex),
    /// In the stage.
    Staged(StageIndex),
    /// In the stage, being copied back by a fault.
    Returning(StageIndex),
    /// In the swap space. The entry owns one count of the slot.
    Swapped(Slot),
    /// In the swap space, being copied in by the fault of this claim, which owns the count.
    Filling(Slot, ClaimNumber),
    /// A fault found it missing and fills it with zeros. The claim keeps reclaim away: a fault
    /// that was read late must not put zeros where a page was moved out just now.
    Clearing,
}

/// One dropping of pages by `madvise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// When its event was applied, in seconds since the supervisor's start.
    pub seconds: u32,
    /// Which it was, of those of that time: as many bits of its address space's count as fit.
    number: u32,
}

impl Removal {
    /// The one that `count` others came before in its address space.
    pub fn new(seconds: u32, count: u32) -> Removal {
        let number = count & NUMBER_MASK;
        Removal { seconds, number }
    }

    /// Whether the kernel has dropped the pages by now.
    pub fn is_over(self, now: u32) -> bool {
        now.saturating_sub(self.seconds) > REMOVED_GRACE
    }
}

/// Tells a fault's claim of a page from one that another makes later, which may be of the same slot: a
/// page that moved to another address and back is as it was. Comes again after 16 million claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClaimNumber(u32);

impl ClaimNumber {
    /// The one that `count` others came before.
    pub fn new(count: u32) -> ClaimNumber {
        ClaimNumber(count & NUMBER_MASK)
    }
}

const TAG_MASK: u64 = 0xf;
const SKIPS: u32 = 4;
const SKIPS_MASK: u64 = MOST_SKIPS as u64;
const SHARED: u64 = 1 << 7;
const PAYLOAD: u32 = 8;
const NUMBER: u32 = 40;
const NUMBER_MASK: u32 = u32::MAX >> (NUMBER - 32);
/// Seconds after which `madvise` has dropped what it said it would.
const REMOVED_GRACE: u32 = 10;
/// How often the clock hand passes over a page at most.
pub const MOST_SKIPS: u8 = 7;

impl PageState {
    /// Resident.
    pub const RESIDENT: PageState = PageState::Resident {
        skips: 0,
        shared: false,
    };

    /// Resident, and passed over once.
    pub const FRESH: PageState = PageState::Resident {
        skips: 1,
        shared: false,
    };

    /// Resident, and asked for again soon after it left.
    pub const HOT: PageState = PageState::Resident {
        skips: MOST_SKIPS,
        shared: false,
    };

    /// What a page becomes that the clock hand passes over, if it does.
    pub fn skipped(self) -> Option<PageState> {
        match self {
            PageState::Resident {
                skips: skips @ 1..,
                shared,
            } => Some(PageState::Resident {
                skips: skips - 1,
                shared,
            }),
            _ => None,
        }
    }

    fn pack(self) -> u64 {
        let with = |tag: u64, payload: u32| tag | u64::from(payload) << PAYLOAD;
        match self {
            PageState::Hole => 0,
            PageState::Resident { skips, shared } => {
                let skips = u64::from(skips) & SKIPS_MASK;
                1 | skips << SKIPS | if shared { SHARED } else { 0 }
            }
            PageState::Removed(removal) => {
                with(2, removal.seconds) | u64::from(removal.number) << NUMBER
            }
            PageState::Moving(index) => with(3, index.0),
            PageState::Staged(index) => with(4, index.0),
            PageState::Returning(index) => with(5, index.0),
            PageState::Swapped(slot) => with(6, slot.into_raw()),
            PageState::Filling(slot, claim) => {
                with(7, slot.into_raw()) | u64::from(claim.0) << NUMBER
            }
            PageState::Clearing => 8,
        }
    }

    fn unpack(word: u64) -> PageState {
        let payload = (word >> PAYLOAD) as u32;
        match word & TAG_MASK {
            0 => PageState::Hole,
            1 => PageState::Resident {
                skips: (word >> SKIPS & SKIPS_MASK) as u8,
                shared: word & SHARED != 0,
            },
            2 => PageState::Removed(Removal {
                seconds: payload,
                number: (word >> NUMBER) as u32,
            }),
            3 => PageState::Moving(StageIndex(payload)),
            4 => PageState::Staged(StageIndex(payload)),
            5 => PageState::Returning(StageIndex(payload)),
            6 => PageState::Swapped(Slot::from_raw(payload)),
            7 => PageState::Filling(
                Slot::from_raw(payload),
                ClaimNumber((word >> NUMBER) as u32),
            ),
            8 => PageState::Clearing,
            tag => unreachable!("page state with tag {tag}"),
        }
    }
}

/// A page's entry in the page table.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Entry(AtomicU64);

impl Entry {
    /// A hole.
    pub const fn new() -> Entry {
        Entry(AtomicU64::new(0))
    }

    /// The state now.
    pub fn load(&self) -> PageState {
        // Acquire: a slot or stage index is read after what its writer stored there.
        PageState::unpack(self.0.load(Ordering::Acquire))
    }

    /// Whether nothing is known of the page.
    pub fn is_hole(&self) -> bool {
        self.0.load(Ordering::Relaxed) == PageState::Hole.pack()
    }

    /// Changes the state if it is still `from`.
    pub fn replace(&self, from: PageState, to: PageState) -> bool {
        // AcqRel: what was stored in the slot or stage that the old state names is seen, and so is
        // what was for the new one.
        self.0
            .compare_exchange(from.pack(), to.pack(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Sets the state; the gate is held exclusively.
    pub fn set(&self, to: PageState) {
        self.0.store(to.pack(), Ordering::Release);
    }

    /// Sets the state and returns the one before; the gate is held exclusively.
    pub fn take(&self, to: PageState) -> PageState {
        PageState::unpack(self.0.swap(to.pack(), Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_survive_packing() {
        let slot = Slot::from_raw(u32::MAX - 1);
        let index = StageIndex(8191);
        for state in [
            PageState::Hole,
            PageState::Resident {
                skips: 0,
                shared: false,
            },
            PageState::Resident {
                skips: 1,
                shared: false,
            },
            PageState::Resident {
                skips: 0,
                shared: true,
            },
            PageState::Resident {
                skips: MOST_SKIPS,
                shared: true,
            },
            PageState::Removed(Removal::new(u32::MAX, u32::MAX)),
            PageState::Moving(index),
            PageState::Staged(index),
            PageState::Returning(index),
            PageState::Swapped(slot),
            PageState::Filling(slot, ClaimNumber::default()),
            PageState::Filling(slot, ClaimNumber::new(u32::MAX)),
            PageState::Clearing,
        ] {
            assert_eq!(PageState::unpack(state.pack()), state);
        }
        assert_eq!(Entry::default().load(), PageState::Hole);
    }

    #[test]
    fn a_hot_page_is_passed_over_seven_times() {
        let laps = std::iter::successors(Some(PageState::HOT), |state| state.skipped());
        assert_eq!(laps.count(), 1 + 7);
        assert_eq!(PageState::RESIDENT.skipped(), None);
        assert_eq!(PageState::FRESH.skipped(), Some(PageState::RESIDENT));
    }

    #[test]
    fn replace_needs_the_expected_state() {
        let entry = Entry::default();
        assert!(!entry.replace(PageState::FRESH, PageState::Hole));
        assert!(entry.replace(PageState::Hole, PageState::FRESH));
        assert_eq!(entry.take(PageState::Hole), PageState::FRESH);
    }
}
