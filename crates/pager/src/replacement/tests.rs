//! Replacement against first in, first out and the optimum, on patterns whose outcome is known.

use super::*;
use crate::page::VirtualPage;
use proptest::prelude::*;

#[derive(Debug, Clone, Copy)]
enum Where {
    Nowhere,
    /// With the number of times the hand still skips it.
    Resident(u8),
    Out(Shadow),
}

/// Memory of `room` pages, reclaimed in batches as the pager does.
struct Memory {
    pages: Vec<Where>,
    room: usize,
    resident: usize,
    hand: usize,
    now: Age,
    /// `None`: first in, first out.
    replacement: Option<Replacement>,
    misses: usize,
}

const BATCH: usize = 64;

impl Memory {
    fn new(pages: usize, room: usize, is_adaptive: bool) -> Memory {
        Memory {
            pages: vec![Where::Nowhere; pages],
            room,
            resident: 0,
            hand: 0,
            now: Age(0),
            replacement: is_adaptive.then(Replacement::default),
            misses: 0,
        }
    }

    fn touch(&mut self, page: usize) {
        let found = self.pages[page];
        if matches!(found, Where::Resident(_)) {
            return;
        }
        self.resident += 1;
        self.pages[page] = Where::Resident(0);
        if let Where::Out(shadow) = found {
            self.misses += 1;
            if let Some(replacement) = &mut self.replacement
                && replacement.refault(shadow, 1, self.now) == List::Inactive
            {
                let start = VirtualPage(page as u64);
                let end = start.plus(1);
                replacement.add_inactive(PageRange { start, end });
            }
        }
        if self.resident >= self.room {
            self.reclaim();
        }
    }

    fn reclaim(&mut self) {
        let mut wanted = BATCH;
        let mut samples = 0;
        if let Some(replacement) = &mut self.replacement {
            let (own, all) = (self.resident as u64, self.resident as u64);
            let quota = replacement.quota(wanted, own, all);
            samples = quota.samples;
            let mut left = quota.inactive;
            let mut to_sample = samples;
            while left > 0
                && let Some(range) = self
                    .replacement
                    .as_mut()
                    .and_then(Replacement::take_inactive)
            {
                let page = range.start.0 as usize;
                if self.evict(page, List::Inactive, &mut to_sample) {
                    left -= 1;
                    wanted -= 1;
                }
            }
            if let Some(replacement) = &mut self.replacement {
                replacement.activate_oldest();
                if !replacement.is_fifo() {
                    let pages = self.pages.len() as u64;
                    let start = replacement.random_below(pages) as usize;
                    for page in start..self.pages.len() {
                        if samples > 0 && self.evict(page, List::Active, &mut samples) {
                            wanted -= 1;
                        }
                    }
                    samples = 0;
                }
            }
        }
        while wanted > 0 {
            let page = self.hand;
            self.hand = (self.hand + 1) % self.pages.len();
            if self.evict(page, List::Active, &mut samples) {
                wanted -= 1;
            }
        }
    }

    fn evict(&mut self, page: usize, list: List, samples: &mut usize) -> bool {
        let Where::Resident(skips) = self.pages[page] else {
            return false;
        };
        if skips > 0 {
            self.pages[page] = Where::Resident(skips - 1);
            return false;
        }
        let sample = (*samples > 0).then_some(list);
        *samples = samples.saturating_sub(1);
        self.now = Age(self.now.0.wrapping_add(1));
        if let (Some(replacement), Some(list)) = (&mut self.replacement, sample) {
            replacement.evicted(self.now, list);
        }
        self.pages[page] = Where::Out(Shadow::new(self.now, sample));
        self.resident -= 1;
        true
    }
}

/// Misses of first in, first out, and of the two lists.
fn misses(pages: usize, room: usize, accesses: &[usize]) -> (usize, usize) {
    let run = |is_adaptive| {
        let mut memory = Memory::new(pages, room, is_adaptive);
        accesses.iter().for_each(|page| memory.touch(*page));
        memory.misses
    };
    (run(false), run(true))
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
