//! How far apart page-out and swap-in of a page lie, in pages that went out between them: the memory that
//! would have spared the swap-in.
//!
//! One slot in [`SAMPLED`] is followed, chosen by a hash of its number. A slot that is freed without a
//! swap-in leaves its entry behind, until another slot takes it.

use crate::replacement::{Age, Shadow};
use crate::supervised::latency::Histogram;
use memfold_swap::Slot;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One slot in so many is followed. More costs less and makes short runs less exact.
const SAMPLED: u64 = 32;
/// Entries. More follow more pages that are out at once: these suffice for 8 GiB.
const ENTRIES: usize = 1 << 16;

/// A sample of refault distances. The reclaimer notes page-outs, handlers swap-ins; all accesses are
/// Relaxed, as a lost entry is one sample less.
pub(crate) struct Refaults {
    /// Pages that went out so far.
    out: AtomicU64,
    /// For each followed slot: its number above, `out` when it was filled below.
    /// Made at the first page-out: most runs have none, and should start fast.
    followed: OnceLock<Box<[AtomicU64]>>,
    distances: Histogram,
}

impl Default for Refaults {
    fn default() -> Self {
        Refaults {
            out: AtomicU64::new(0),
            followed: OnceLock::new(),
            distances: Histogram::default(),
        }
    }
}

/// The entry of a slot, if it is followed.
fn entry_of(slot: Slot) -> Option<usize> {
    // Fibonacci hashing: neighbouring slots are spread evenly.
    let hash = u64::from(slot.into_raw()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (hash % SAMPLED == 0).then_some((hash / SAMPLED) as usize % ENTRIES)
}

impl Refaults {
    /// Pages that went out so far.
    pub(crate) fn age(&self) -> Age {
        Age(self.out.load(Relaxed) as u32)
    }

    /// The shadow of a page that goes out now, and is no sample.
    pub(crate) fn shadow(&self) -> Shadow {
        Shadow::new(self.age(), None)
    }

    /// A page went out. Returns the age at which it did.
    pub(crate) fn note_out(&self, slot: Slot) -> Age {
        let out = self.out.fetch_add(1, Relaxed) + 1;
        if let Some(entry) = entry_of(slot) {
            let packed = u64::from(slot.into_raw()) << 32 | out & u64::from(u32::MAX);
            let empty = || (0..ENTRIES).map(|_| AtomicU64::new(0)).collect();
            self.followed.get_or_init(empty)[entry].store(packed, Relaxed);
        }
        Age(out as u32)
    }

    /// A page came back.
    pub(crate) fn note_in(&self, slot: Slot) {
        let (Some(entry), Some(followed)) = (entry_of(slot), self.followed.get()) else {
            return;
        };
        let packed = followed[entry].load(Relaxed);
        if packed != 0 && packed >> 32 == u64::from(slot.into_raw()) {
            followed[entry].store(0, Relaxed);
            let then = packed as u32;
            let distance = (self.out.load(Relaxed) as u32).wrapping_sub(then);
            self.distances.record(u64::from(distance));
        }
    }

    /// The part of the swap-ins that would remain with room for so many pages more.
    pub(crate) fn remaining(&self, pages: u64) -> f64 {
        self.distances.part_above(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goes round `all` pages, of which `resident` fit, in slots of their own.
    fn sweep(refaults: &Refaults, all: u32, resident: u32, laps: u32) {
        for access in 0..all * laps {
            if access >= all {
                refaults.note_in(Slot::from_raw(access % all));
            }
            if access >= resident {
                refaults.note_out(Slot::from_raw((access - resident) % all));
            }
        }
    }

    #[test]
    fn a_sweep_needs_the_pages_that_do_not_fit() {
        let refaults = Refaults::default();
        assert_eq!(refaults.remaining(0), 0.0, "nothing came back");
        sweep(&refaults, 50_000, 30_000, 4);
        assert!(refaults.remaining(18_000) > 0.99);
        assert!(refaults.remaining(22_000) < 0.01);
    }

    #[test]
    fn few_slots_are_followed_evenly() {
        for start in [0, 1 << 20, u32::MAX - 100_000] {
            let slots = (start..start + 100_000).map(Slot::from_raw);
            let followed = slots.filter(|slot| entry_of(*slot).is_some()).count();
            assert!((2900..3400).contains(&followed), "{followed} from {start}");
        }
    }
}
