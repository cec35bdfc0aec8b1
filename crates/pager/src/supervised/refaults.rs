//! How much more memory would have spared a swap-in, in pages: those that went out after the page and are
//! still out when it comes back. With room for them it would not have gone out, where pages go out in the
//! order of their use. Pages that went out in between and came back are not counted: each of them would
//! otherwise count again at every lap of a program that needs more than fits.
//!
//! One slot in [`SAMPLED`] is followed, chosen by a hash of its number. A slot that is freed without a
//! swap-in counts as out until another page takes it.

use crate::replacement::{Age, Shadow};
use crate::supervised::latency::Histogram;
use crate::sync::{Mutex, lock};
use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One slot in so many is followed. More costs less and makes short runs less exact.
const SAMPLED: u64 = 32;
/// Pages that are followed at a time. More follow more pages that are out at once: these suffice for 8 GiB.
const ENTRIES: usize = 1 << 16;

/// A sample of refault distances. The reclaimer notes page-outs, handlers swap-ins.
#[derive(Default)]
pub(crate) struct Refaults {
    /// Pages that went out so far. Relaxed: no data depends on it.
    out: AtomicU64,
    /// Made at the first page-out: most runs have none, and should start fast.
    followed: Mutex<Option<Followed>>,
    distances: Histogram,
}

/// A page that is out.
#[derive(Clone, Copy, Default)]
struct Entry {
    slot: u32,
    /// Its position in the order of page-outs, from 1; 0: there is no page.
    position: u32,
}

/// The followed pages that are out, in the order in which they went.
struct Followed {
    /// By a hash of the slot.
    entries: Vec<Entry>,
    /// The entry at each position, plus 1; 0 where its page came back.
    order: Vec<u32>,
    /// Counts the positions in use: a Fenwick tree.
    counts: Vec<u32>,
    /// Positions in use.
    out: u32,
    /// The position of the next page.
    next: usize,
}

/// The entry of a slot, if it is followed.
fn entry_of(slot: Slot) -> Option<usize> {
    // Fibonacci hashing: neighbouring slots are spread evenly.
    let hash = u64::from(slot.into_raw()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (hash % SAMPLED == 0).then_some((hash / SAMPLED) as usize % ENTRIES)
}

impl Followed {
    /// Twice the entries: positions are given anew after as many page-outs as there are entries at least.
    const POSITIONS: usize = 2 * ENTRIES + 1;

    fn new() -> Followed {
        // Zeroed memory takes no page before it is used.
        Followed {
            entries: vec![Entry::default(); ENTRIES],
            order: vec![0; Self::POSITIONS],
            counts: vec![0; Self::POSITIONS],
            out: 0,
            next: 1,
        }
    }

    fn count(&mut self, position: usize, change: i32) {
        let mut at = position;
        while at < Self::POSITIONS {
            self.counts[at] = self.counts[at].wrapping_add_signed(change);
            at += at & at.wrapping_neg();
        }
        self.out = self.out.wrapping_add_signed(change);
    }

    /// Pages that are out and went after the one at a position.
    fn after(&self, position: usize) -> u32 {
        let (mut at, mut until) = (position, 0);
        while at > 0 {
            until += self.counts[at];
            at &= at - 1;
        }
        self.out - until
    }

    /// A page is followed in this entry from now on, instead of the one before.
    fn insert(&mut self, entry: usize, slot: u32) {
        self.take(entry);
        if self.next == Self::POSITIONS {
            self.renumber();
        }
        let position = self.next;
        self.next += 1;
        self.order[position] = entry as u32 + 1;
        self.entries[entry] = Entry {
            slot,
            position: position as u32,
        };
        self.count(position, 1);
    }

    /// Follows the page of an entry no longer. Returns how many went after it and are still out.
    fn take(&mut self, entry: usize) -> Option<u32> {
        let position = self.entries[entry].position as usize;
        if position == 0 {
            return None;
        }
        let after = self.after(position);
        self.entries[entry] = Entry::default();
        self.order[position] = 0;
        self.count(position, -1);
        Some(after)
    }

    /// Gives the pages that are out the first positions, in their order.
    fn renumber(&mut self) {
        let order = std::mem::replace(&mut self.order, vec![0; Self::POSITIONS]);
        self.counts = vec![0; Self::POSITIONS];
        (self.out, self.next) = (0, 1);
        for place in order.into_iter().filter(|place| *place != 0) {
            let position = self.next;
            self.next += 1;
            self.order[position] = place;
            self.entries[place as usize - 1].position = position as u32;
            self.count(position, 1);
        }
    }
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
            let mut followed = lock(&self.followed);
            let followed = followed.get_or_insert_with(Followed::new);
            followed.insert(entry, slot.into_raw());
        }
        Age(out as u32)
    }

    /// A page came back.
    pub(crate) fn note_in(&self, slot: Slot) {
        let Some(entry) = entry_of(slot) else { return };
        let mut followed = lock(&self.followed);
        let Some(followed) = &mut *followed else {
            return;
        };
        if followed.entries[entry].slot != slot.into_raw() {
            return;
        }
        if let Some(after) = followed.take(entry) {
            self.distances.record(u64::from(after) * SAMPLED);
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

    /// A fixed sequence that is as good as random.
    fn random() -> impl FnMut(u32) -> u32 {
        let mut state = 1_u64;
        move |below| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((state >> 33) % u64::from(below)) as u32
        }
    }

    /// Accesses at random to `hot` pages, of which `resident` fit, while others lie outside for good.
    #[test]
    fn hot_pages_need_no_more_than_their_own_room_however_often_they_go_out() {
        for (hot, resident) in [(12_800, 11_000), (12_800, 6_400), (12_800, 2_000)] {
            let refaults = Refaults::default();
            let mut random = random();
            let out = |page| {
                refaults.note_out(Slot::from_raw(page));
            };
            (hot..3 * hot).for_each(out);
            // What is resident, the oldest first, as the clock hand takes it.
            let mut queue: std::collections::VecDeque<u32> = (0..resident).collect();
            let mut is_in: Vec<bool> = (0..hot).map(|page| page < resident).collect();
            (resident..hot).for_each(out);
            for _ in 0..200_000 {
                let page = random(hot);
                if !std::mem::replace(&mut is_in[page as usize], true) {
                    refaults.note_in(Slot::from_raw(page));
                    let victim = queue.pop_front().unwrap();
                    is_in[victim as usize] = false;
                    refaults.note_out(Slot::from_raw(victim));
                    queue.push_back(page);
                }
            }
            let missing = u64::from(hot - resident);
            assert!(
                refaults.remaining(missing * 11 / 10 + 200) < 0.01,
                "{resident}"
            );
            let half = refaults.remaining(missing / 2);
            assert!((0.35..0.65).contains(&half), "{resident}: {half}");
        }
    }

    #[test]
    fn positions_are_given_anew_in_the_same_order() {
        let mut followed = Followed::new();
        let mut random = random();
        let mut model: Vec<usize> = Vec::new();
        for step in 0..4 * ENTRIES {
            let entry = random(500) as usize;
            let place = model.iter().position(|one| *one == entry);
            let after = place.map(|place| (model.len() - 1 - place) as u32);
            place.map(|place| model.remove(place));
            if step % 3 == 0 {
                assert_eq!(followed.take(entry), after);
            } else {
                followed.insert(entry, step as u32);
                model.push(entry);
            }
            assert_eq!(followed.out as usize, model.len());
        }
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
