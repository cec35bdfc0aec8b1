//! Sets of pages of an extent.

use std::{
    ops::Range,
    // Always the standard library's: they change under a lock, and unlocked reads are hints, so
    // loom has nothing to check.
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

use crate::geometry::{MAX_EXTENT_PAGES, UNIT_PAGES};

const MAX_UNITS: usize = MAX_EXTENT_PAGES / UNIT_PAGES;
const _: () = assert!(UNIT_PAGES == u16::BITS as usize);

/// A bit for each page of a unit.
pub(crate) type UnitBits = u16;

/// The first unit of a run of at most a unit's pages, and its bits in that unit and the next.
fn bits_of(run: &Range<usize>) -> (usize, u32) {
    debug_assert!(run.len() <= UNIT_PAGES && run.end <= MAX_EXTENT_PAGES);
    let bits = ((1_u32 << run.len()) - 1) << (run.start % UNIT_PAGES);
    (run.start / UNIT_PAGES, bits)
}

/// The pages of a run that are in a set given by its units, as bits.
fn found_of(run: &Range<usize>, unit_bits: impl Fn(usize) -> UnitBits) -> u32 {
    let (unit, bits) = bits_of(run);
    let of = |unit| u32::from(if unit < MAX_UNITS { unit_bits(unit) } else { 0 });
    (of(unit) | of(unit + 1) << UNIT_PAGES) & bits
}

/// Pages of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageSet([UnitBits; MAX_UNITS]);

impl PageSet {
    pub(crate) const EMPTY: Self = Self([0; MAX_UNITS]);

    /// The pages of a unit that are in the set.
    pub(crate) fn unit(&self, unit: usize) -> UnitBits {
        self.0[unit]
    }

    pub(crate) fn insert_in(&mut self, unit: usize, pages: UnitBits) {
        self.0[unit] |= pages;
    }

    /// Whether one of the pages of a run is in the set.
    pub(crate) fn meets(&self, run: &Range<usize>) -> bool {
        found_of(run, |unit| self.unit(unit)) != 0
    }

    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|bits| bits.count_ones() as usize).sum()
    }

    /// The maximal ranges of pages in the set, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = self.find(next, true)?;
            next = self.find(start, false).unwrap_or(MAX_EXTENT_PAGES);
            Some(start..next)
        })
    }

    /// The first page from `from` on that is in the set, or that is not.
    fn find(&self, from: usize, contained: bool) -> Option<usize> {
        let flip = if contained { 0 } else { UnitBits::MAX };
        let mut ahead = UnitBits::MAX << (from % UNIT_PAGES);
        for unit in from / UNIT_PAGES..MAX_UNITS {
            let found = (self.unit(unit) ^ flip) & ahead;
            if found != 0 {
                return Some(unit * UNIT_PAGES + found.trailing_zeros() as usize);
            }
            ahead = UnitBits::MAX;
        }
        None
    }
}

/// A set that threads share. It changes under a lock; without it a read is a hint.
#[derive(Debug)]
pub(crate) struct SharedPageSet([AtomicU16; MAX_UNITS]);

impl SharedPageSet {
    pub(crate) const fn new() -> Self {
        Self([const { AtomicU16::new(0) }; MAX_UNITS])
    }

    /// The pages of a unit that are in the set.
    pub(crate) fn unit(&self, unit: usize) -> UnitBits {
        self.0[unit].load(Relaxed)
    }

    pub(crate) fn set_unit(&self, unit: usize, pages: UnitBits) {
        self.0[unit].store(pages, Relaxed);
    }

    /// Inserts the pages of a run, or of a part of one.
    pub(crate) fn insert(&self, run: &Range<usize>) {
        self.change(run, |pages, bits| pages | bits);
    }

    /// Removes the pages of a run.
    pub(crate) fn remove(&self, run: &Range<usize>) {
        self.change(run, |pages, bits| pages & !bits);
    }

    /// Whether all pages of a run are in the set.
    pub(crate) fn contains(&self, run: &Range<usize>) -> bool {
        found_of(run, |unit| self.unit(unit)).count_ones() as usize == run.len()
    }

    /// Whether one of the pages of a run is in the set.
    pub(crate) fn meets(&self, run: &Range<usize>) -> bool {
        found_of(run, |unit| self.unit(unit)) != 0
    }

    fn change(&self, run: &Range<usize>, to: impl Fn(UnitBits, UnitBits) -> UnitBits) {
        let (first, both) = bits_of(run);
        for (unit, bits) in [(first, both), (first + 1, both >> UNIT_PAGES)] {
            let bits = bits as UnitBits;
            if bits != 0 {
                self.set_unit(unit, to(self.unit(unit), bits));
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn set(pages: impl IntoIterator<Item = usize>) -> PageSet {
        let mut set = PageSet::EMPTY;
        for page in pages {
            set.insert_in(page / UNIT_PAGES, 1 << (page % UNIT_PAGES));
        }
        set
    }

    #[test]
    fn parts_of_a_set_are_what_follows_one_another() {
        assert_eq!(PageSet::EMPTY.parts().next(), None);
        let some = set([0, 2, 3, 63, 64, 511]);
        let found: Vec<_> = some.parts().collect();
        assert_eq!(found, [0..1, 2..4, 63..65, 511..512]);
        assert_eq!(some.count(), 6);
        assert!(set(0..512).parts().eq(std::iter::once(0..512)));
    }

    #[test]
    fn runs_lie_in_up_to_two_units() {
        let shared = SharedPageSet::new();
        for run in [0..1, 15..31, 16..32, 30..46, 496..512, 40..47] {
            assert!(!shared.meets(&run) && !shared.contains(&run));
            shared.insert(&run);
            let plain = set(run.clone());
            for page in 0..MAX_EXTENT_PAGES {
                let page = page..page + 1;
                assert_eq!(shared.meets(&page), run.contains(&page.start));
                assert_eq!(plain.meets(&page), run.contains(&page.start));
            }
            assert!(shared.contains(&run) && shared.meets(&run));
            shared.remove(&(run.start..run.start + 1));
            assert!(!shared.contains(&run));
            assert_eq!(shared.meets(&run), run.len() > 1);
            shared.remove(&run);
            assert!(!shared.meets(&run));
        }
    }
}
