//! The state of one page, packed into an atomic word.
//!
//! Section 4 of `docs/design.md` has the states and all transitions. Under the exclusive gate a state
//! may be stored; under the shared gate it changes by compare-and-swap from the state that was read.

use crate::bugs::Bug;
use crate::replacement::{SHADOW_BITS, Shadow};
use crate::sync::interleave;
use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering};

/// A place of the stage (one page), by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StageIndex(pub u32);

/// What is known of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageState {
    /// No data: a fault is served with zeros.
    Hole,
    /// In the program's memory.
    Resident {
        /// Number of times the clock hand still skips the page, at most [`MOST_SKIPS`].
        skips: u8,
        /// The page may be shared with another process since a fork. `UFFDIO_MOVE` refuses it until COW
        /// is broken.
        shared: bool,
    },
    /// The event of a `madvise` was read, but the kernel may still drop the page: a fault is served
    /// with zeros, and reclaim must not carry the old contents off before the drop. An event sets every
    /// page of its range that was not a hole to this state, and the first page in any case.
    Removed(Removal),
    /// In a batch that the helper is moving to this place of the stage.
    Moving(StageIndex),
    /// In the stage (swap cache).
    Staged(StageIndex),
    /// In the stage, being copied back by a fault or putback.
    Returning(StageIndex),
    /// In the swap space. The entry owns one reference of the slot.
    Swapped(Slot, Shadow),
    /// In the swap space, being copied in under this claim, which owns the reference.
    Filling(Slot, ClaimNumber),
    /// Missing, being filled with zeros by a fault. The claim excludes reclaim: a fault read late must
    /// not install zeros where a page was just moved out.
    Clearing,
}

/// One `madvise` that drops pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Removal {
    /// Time at which the event was applied, in seconds since the supervisor's start.
    pub seconds: u32,
    /// Low bits of the address space's count of removals, to tell removals of one second apart.
    number: u32,
}

impl Removal {
    /// The removal after `count` others of the address space.
    pub(crate) fn new(seconds: u32, count: u32) -> Removal {
        let number = count & NUMBER_MASK;
        Removal { seconds, number }
    }

    /// Whether the kernel has dropped the pages by `now`, in seconds since the supervisor's start, as nothing
    /// takes so long.
    pub(crate) fn is_old(self, now: u32) -> bool {
        now.saturating_sub(self.seconds) > REMOVED_GRACE
    }

    /// Whether it is one of the first `count` of the address space. Of more than 2^23 before that, by their
    /// numbers alone, some seem not to be.
    pub(crate) fn is_before(self, count: u32) -> bool {
        let behind = count.wrapping_sub(self.number) & NUMBER_MASK;
        behind != 0 && behind <= NUMBER_MASK / 2
    }
}

/// Distinguishes a fault's claim of a page from a later claim of the same page and slot, which is
/// possible if the page moves to another address and back. Numbers repeat after 16 million claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ClaimNumber(u32);

impl ClaimNumber {
    /// The claim after `count` others of the address space.
    pub(crate) fn new(count: u32) -> ClaimNumber {
        if Bug::ClaimsWithoutNumbers.is_back() {
            return ClaimNumber(0);
        }
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
const _: () = assert!(NUMBER + SHADOW_BITS <= u64::BITS);
/// Seconds after which the kernel has dropped the pages of a `madvise` whose event was read, where its thread
/// cannot be seen to be done. A larger value keeps rewritten pages resident for longer.
const REMOVED_GRACE: u32 = 10;
/// Number of times the clock hand skips a page that refaulted early. A larger value protects the
/// working set better and makes the hand search for longer. It must be a mask of low bits.
pub(crate) const MOST_SKIPS: u8 = 7;

impl PageState {
    /// Resident, and a victim when the clock hand comes by.
    pub(crate) const RESIDENT: PageState = PageState::Resident {
        skips: 0,
        shared: false,
    };

    /// Resident, and skipped once by the clock hand.
    pub(crate) const FRESH: PageState = PageState::Resident {
        skips: 1,
        shared: false,
    };

    /// Resident after an early refault, and skipped [`MOST_SKIPS`] times by the clock hand.
    pub(crate) const HOT: PageState = PageState::Resident {
        skips: MOST_SKIPS,
        shared: false,
    };

    /// The state after the clock hand skips the page; `None` if the hand does not skip it.
    pub(crate) fn skipped(self) -> Option<PageState> {
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
            PageState::Swapped(slot, shadow) => {
                with(6, slot.into_raw()) | u64::from(shadow.into_raw()) << NUMBER
            }
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
            6 => PageState::Swapped(
                Slot::from_raw(payload),
                Shadow::from_raw((word >> NUMBER) as u32),
            ),
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
pub(crate) struct Entry(AtomicU64);

impl Entry {
    /// An entry in state [`PageState::Hole`].
    pub(crate) const fn new() -> Entry {
        Entry(AtomicU64::new(0))
    }

    /// The current state.
    pub(crate) fn load(&self) -> PageState {
        interleave();
        // Acquire: pairs with the thread that stored data in the slot or place and then set this state.
        PageState::unpack(self.0.load(Ordering::Acquire))
    }

    /// Whether the page is a hole. Relaxed: no data is read through a hole.
    pub(crate) fn is_hole(&self) -> bool {
        self.0.load(Ordering::Relaxed) == PageState::Hole.pack()
    }

    /// Changes the state if it is still `from`.
    pub(crate) fn replace(&self, from: PageState, to: PageState) -> bool {
        interleave();
        // AcqRel: acquires the data of the slot or place in `from`, and publishes that of `to`.
        self.0
            .compare_exchange(from.pack(), to.pack(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Sets the state. The gate is held exclusively.
    pub(crate) fn set(&self, to: PageState) {
        self.0.store(to.pack(), Ordering::Release);
    }

    /// Sets the state and returns the previous one. The gate is held exclusively.
    pub(crate) fn take(&self, to: PageState) -> PageState {
        PageState::unpack(self.0.swap(to.pack(), Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replacement::{Age, List};

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
            PageState::Swapped(slot, Shadow::default()),
            PageState::Swapped(slot, Shadow::new(Age(u32::MAX), Some(List::Inactive))),
            PageState::Filling(slot, ClaimNumber::default()),
            PageState::Filling(slot, ClaimNumber::new(u32::MAX)),
            PageState::Clearing,
        ] {
            assert_eq!(PageState::unpack(state.pack()), state);
        }
        assert_eq!(Entry::default().load(), PageState::Hole);
    }

    #[test]
    fn a_hot_page_is_skipped_seven_times() {
        let states = std::iter::successors(Some(PageState::HOT), |state| state.skipped());
        assert_eq!(states.count(), 1 + 7);
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
