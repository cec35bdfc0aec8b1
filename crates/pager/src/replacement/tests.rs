//! Replacement against first in, first out and the optimum, on patterns whose outcome is known.

use super::*;
use crate::page::VirtualPage;
use crate::replay::ReplayedMemory;
use proptest::prelude::*;

/// Misses of first in, first out, and of the two lists.
fn misses(pages: usize, room: usize, accesses: &[usize]) -> (usize, usize) {
    let run = |mut memory: ReplayedMemory| {
        let refaults = accesses
            .iter()
            .filter(|page| !memory.is_resident(**page) && memory.fault(**page));
        refaults.count()
    };
    let fifo = run(ReplayedMemory::with_hand_alone(pages, room));
    (fifo, run(ReplayedMemory::new(pages, room)))
}

/// Accesses with a fixed sequence of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    /// A page of a Zipf-like distribution, spread over all pages.
    fn zipf(&mut self, pages: usize) -> usize {
        let unit = self.below(1 << 30) as f64 / f64::from(1 << 30);
        let rank = (pages as f64).powf(unit) as usize;
        rank.min(pages - 1) * 7919 % pages
    }
}

const PAGES: usize = 10_007;
const LAPS: usize = 20;

fn cycle(laps: usize) -> Vec<usize> {
    (0..laps).flat_map(|_| 0..PAGES).collect()
}

#[test]
fn a_cycle_misses_little_more_than_the_optimum() {
    for room in [PAGES / 2, PAGES / 3, PAGES * 45 / 100] {
        let (fifo, lists) = misses(PAGES, room, &cycle(LAPS));
        let optimum = (PAGES - room) * (LAPS - 1);
        assert!(fifo > optimum * 4 / 3, "{fifo} of {optimum}");
        assert!(
            lists * 100 <= optimum * 115,
            "{lists} misses where {optimum} are the least, with room for {room}"
        );
    }
}

#[test]
fn skewed_accesses_miss_no_more_than_before() {
    let mut random = Random(88_172_645_463_325_252);
    let accesses: Vec<usize> = (0..400_000).map(|_| random.zipf(PAGES)).collect();
    for room in [PAGES / 2, PAGES / 3] {
        let (fifo, lists) = misses(PAGES, room, &accesses);
        assert!(lists * 100 <= fifo * 106, "{lists} misses, {fifo} before");
    }
}

#[test]
fn a_pattern_that_changes_costs_a_tenth_at_most() {
    let mut random = Random(88_172_645_463_325_252);
    let mut accesses = cycle(1);
    for phase in 0..10 {
        if phase % 2 == 0 {
            accesses.extend((0..60_000).map(|_| random.zipf(PAGES)));
        } else {
            accesses.extend(cycle(6));
        }
    }
    let (fifo, lists) = misses(PAGES, PAGES / 2, &accesses);
    assert!(lists < fifo, "{lists} misses, {fifo} before");
    // A working set that fits, and moves.
    let mut accesses = cycle(1);
    for phase in 0..8 {
        let start = phase * 1009 % (PAGES - 3000);
        accesses.extend((0..40_000).map(|_| start + random.below(3000)));
    }
    for room in [PAGES / 2, PAGES / 3] {
        let (fifo, lists) = misses(PAGES, room, &accesses);
        assert!(lists * 10 <= fifo * 11, "{lists} misses, {fifo} before");
    }
}

#[test]
fn a_scan_leaves_the_hot_pages() {
    let mut random = Random(88_172_645_463_325_252);
    let hot = 2000;
    let mut scan = (hot..PAGES).cycle();
    let accesses: Vec<usize> = (0..300_000)
        .filter_map(|_| match random.below(10) {
            0..3 => scan.next(),
            _ => Some(random.below(hot)),
        })
        .collect();
    let (fifo, lists) = misses(PAGES, PAGES / 2, &accesses);
    assert!(lists * 100 <= fifo * 85, "{lists} misses, {fifo} before");
}

#[test]
fn what_is_never_used_again_does_not_stay() {
    // A program that fills its memory, and then works in a part that was evicted and fits.
    let mut accesses = cycle(1);
    for _ in 0..20 {
        accesses.extend(0..4000);
    }
    let (_, lists) = misses(PAGES, 5000, &accesses);
    assert!(lists <= 4 * 4000, "{lists} misses of 4000 pages that fit");
}

#[test]
fn ages_may_wrap() {
    let before = Age(u32::MAX - 100);
    let shadow = Shadow::new(before, Some(List::Inactive));
    assert_eq!(shadow.distance(Age(before.0.wrapping_add(4000))), 4000);
    assert_eq!(shadow.sample(), Some(List::Inactive));
}

#[test]
fn the_inactive_list_is_bounded() {
    let mut replacement = Replacement::default();
    for page in 0..3 * RANGES_MAX as u64 {
        let start = VirtualPage(2 * page);
        let end = start.plus(1);
        replacement.add_inactive(PageRange { start, end });
    }
    assert_eq!(replacement.list.ranges.len(), RANGES_MAX);
    assert_eq!(replacement.list.pages, RANGES_MAX as u64);
}

proptest! {
    #[test]
    fn shadows_survive_packing(age: u32, sample in 0..3u8) {
        let sample = [None, Some(List::Active), Some(List::Inactive)][usize::from(sample)];
        let shadow = Shadow::new(Age(age), sample);
        prop_assert_eq!(Shadow::from_raw(shadow.into_raw()), shadow);
        prop_assert!(shadow.into_raw() < 1 << SHADOW_BITS);
        prop_assert!(shadow.distance(Age(age)) == 0);
    }

    /// Whatever ages come, rates stay numbers.
    #[test]
    fn rates_stay_finite(steps in prop::collection::vec((any::<u32>(), 0..4u8), 1..200)) {
        let mut replacement = Replacement::default();
        replacement.quota(64, 1000, 1000);
        let mut shadow = Shadow::default();
        for (age, step) in steps {
            match step {
                0 | 1 => {
                    let list = [List::Active, List::Inactive][usize::from(step)];
                    replacement.evicted(Age(age), list);
                    shadow = Shadow::new(Age(age), Some(list));
                }
                2 => { replacement.refault(shadow, 1, Age(age)); }
                _ => replacement.read_ahead(shadow, Age(age)),
            }
            prop_assert!(replacement.active.rate().is_finite() && replacement.active.rate() >= 0.0);
            prop_assert!(replacement.inactive.rate().is_finite());
        }
    }
}
