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
//! Beside the state stands the page's heat: how often in a row it was asked for again soon after it left.
//! It lasts as long as changes are made one by one, and is forgotten where events move or drop the page.
//!
//! Every change but those made while the gate is held exclusively is a compare-and-swap from the
//! state that was looked at, made while the gate is held shared.

use crate::stage::StageIndex;
use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// Nothing was ever there, or what was there is gone: a fault gets zeros.
    Hole,
    /// In the program's memory.
    Resident {
        /// How many times more the clock hand passes over it; [`MOST_PASSES`] at most.
        passes: u8,
        /// Possibly shared with another process since a fork: it cannot be moved before the
        /// sharing is broken.
        shared: bool,
    },
    /// `madvise` dropped it, maybe not yet in fact: a fault gets zeros, and reclaim keeps away
    /// for a while, or it could carry off the old contents before the kernel drops them. Time in
    /// seconds since the supervisor's start.
    Removed(u32),
    /// In a batch that the helper is moving to this place of the stage.
    Moving(StageIndex),
    /// In the stage.
    Staged(StageIndex),
    /// In the stage, being copied back by a fault.
    Returning(StageIndex),
    /// In the swap space. The entry owns one count of the slot.
    Swapped(Slot),
    /// In the swap space, being copied in by a fault, which owns the count.
    Filling(Slot),
    /// A fault found it missing and fills it with zeros. The claim keeps reclaim away: a fault
    /// that was read late must not put zeros where a page was moved out just now.
    Clearing,
}

const TAG_MASK: u64 = 0xf;
const PASSES: u32 = 4;
const PASSES_MASK: u64 = MOST_PASSES as u64;
const SHARED: u64 = 1 << 7;
const PAYLOAD: u32 = 8;
const HEAT: u32 = 40;
const HEAT_MASK: u64 = 3 << HEAT;
const HOTTEST: u8 = 2;
/// How often the clock hand passes over a page at most.
pub const MOST_PASSES: u8 = 7;
/// How often it does over a page that came back.
const PASSES_OF_HEAT: [u8; HOTTEST as usize + 1] = [0, 3, MOST_PASSES];

impl PageState {
    /// Resident.
    pub const RESIDENT: PageState = PageState::Resident {
        passes: 0,
        shared: false,
    };

    /// Resident, and passed over once.
    pub const FRESH: PageState = PageState::Resident {
        passes: 1,
        shared: false,
    };

    /// What a page becomes that the clock hand passes over, if it does.
    pub fn passed_over(self) -> Option<PageState> {
        match self {
            PageState::Resident {
                passes: passes @ 1..,
                shared,
            } => Some(PageState::Resident {
                passes: passes - 1,
                shared,
            }),
            _ => None,
        }
    }

    fn pack(self) -> u64 {
        let with = |tag: u64, payload: u32| tag | u64::from(payload) << PAYLOAD;
        match self {
            PageState::Hole => 0,
            PageState::Resident { passes, shared } => {
                let passes = u64::from(passes) & PASSES_MASK;
                1 | passes << PASSES | if shared { SHARED } else { 0 }
            }
            PageState::Removed(time) => with(2, time),
            PageState::Moving(index) => with(3, index.0),
            PageState::Staged(index) => with(4, index.0),
            PageState::Returning(index) => with(5, index.0),
            PageState::Swapped(slot) => with(6, slot.raw()),
            PageState::Filling(slot) => with(7, slot.raw()),
            PageState::Clearing => 8,
        }
    }

    fn unpack(word: u64) -> PageState {
        // Without the heat, which lies above.
        let payload = (word >> PAYLOAD) as u32;
        match word & TAG_MASK {
            0 => PageState::Hole,
            1 => PageState::Resident {
                passes: (word >> PASSES & PASSES_MASK) as u8,
                shared: word & SHARED != 0,
            },
            2 => PageState::Removed(payload),
            3 => PageState::Moving(StageIndex(payload)),
            4 => PageState::Staged(StageIndex(payload)),
            5 => PageState::Returning(StageIndex(payload)),
            6 => PageState::Swapped(Slot::from_raw(payload)),
            7 => PageState::Filling(Slot::from_raw(payload)),
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

    /// Changes the state if it is still `from`. What is known of the page's heat stays.
    pub fn replace(&self, from: PageState, to: PageState) -> bool {
        self.replace_by(from, |heat| (to, heat))
    }

    /// The page, whose state was `from`, was asked for and came back: soon after it left, or not. The
    /// more often in a row that was soon, the more often the clock hand passes over it.
    pub fn come_back(&self, from: PageState, soon: bool) -> bool {
        self.replace_by(from, |heat| {
            let heat = if soon { (heat + 1).min(HOTTEST) } else { 0 };
            let came = PageState::Resident {
                passes: PASSES_OF_HEAT[usize::from(heat)],
                shared: false,
            };
            (came, heat)
        })
    }

    fn replace_by(&self, from: PageState, new: impl Fn(u8) -> (PageState, u8)) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while word & !HEAT_MASK == from.pack() {
            let (state, heat) = new(((word & HEAT_MASK) >> HEAT) as u8);
            let packed = state.pack() | u64::from(heat) << HEAT;
            // AcqRel: what was stored in the slot or stage that the old state names is seen, and so is
            // what was for the new one.
            match self
                .0
                .compare_exchange_weak(word, packed, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(other) => word = other,
            }
        }
        false
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
                passes: 0,
                shared: false,
            },
            PageState::Resident {
                passes: 1,
                shared: false,
            },
            PageState::Resident {
                passes: 0,
                shared: true,
            },
            PageState::Resident {
                passes: 7,
                shared: true,
            },
            PageState::Removed(77),
            PageState::Moving(index),
            PageState::Staged(index),
            PageState::Returning(index),
            PageState::Swapped(slot),
            PageState::Filling(slot),
            PageState::Clearing,
        ] {
            assert_eq!(PageState::unpack(state.pack()), state);
        }
        assert_eq!(Entry::default().load(), PageState::Hole);
    }

    #[test]
    fn a_page_that_comes_back_soon_again_and_again_stays_longer() {
        let entry = Entry::default();
        let slot = PageState::Swapped(Slot::from_raw(7));
        let come_back = |soon| {
            let state = entry.load();
            assert!(entry.replace(state, PageState::Staged(StageIndex(3))));
            assert!(entry.replace(PageState::Staged(StageIndex(3)), slot));
            assert_eq!(entry.load(), slot, "the heat is no part of the state");
            assert!(!entry.come_back(PageState::Staged(StageIndex(3)), soon));
            assert!(entry.come_back(slot, soon));
            match entry.load() {
                PageState::Resident { passes, .. } => passes,
                other => panic!("{other:?}"),
            }
        };
        let soon: Vec<u8> = (0..5).map(|_| come_back(true)).collect();
        assert_eq!(soon, [3, 7, 7, 7, 7]);
        assert_eq!(come_back(false), 0);
        assert_eq!(come_back(true), 3, "once late, and it begins anew");
        entry.set(slot);
        assert!(entry.come_back(slot, true));
        let again = PageState::Resident {
            passes: 3,
            shared: false,
        };
        assert_eq!(entry.take(PageState::Hole), again, "forgotten");
    }

    #[test]
    fn replace_needs_the_expected_state() {
        let entry = Entry::default();
        assert!(!entry.replace(PageState::FRESH, PageState::Hole));
        assert!(entry.replace(PageState::Hole, PageState::FRESH));
        assert_eq!(entry.take(PageState::Hole), PageState::FRESH);
    }
}
