//! Fault-around: how many of a page's neighbours to bring in with it, by what that was found to be
//! worth.
//!
//! No user-space program learns whether a page that was brought in unasked is ever touched. So now
//! and then a block of pages is *probed*: its faults bring in the one page each, and which of its
//! other pages are asked for soon tells what bringing them in at once would have saved. The shares
//! of the four, eight and sixteen pages around, each aligned to its own size, say how far to go.
//! Random access never sees a share worth it and pays with nothing but looking.

use crate::page::{PageRange, VirtualPage};

/// Pages of a block.
const BLOCK: u64 = 16;
/// Blocks probed at a time, at most.
const PROBES: usize = 64;
/// A probe lasts this many faults: well below what passes until a page is evicted again, or every
/// neighbour would look wanted.
const PROBE_FAULTS: u64 = 128;
/// Every so many faults (those on probed blocks apart) a probe begins: often, until enough have ended to go by.
const INTERVAL_AT_FIRST: u32 = 4;
const INTERVAL: u32 = 16;
const ENOUGH: u32 = 32;
/// A ring of neighbours is brought in from this share of wanted pages on. A page brought in for
/// nothing costs a fifth of a fault now, and a page-out later.
const WORTH_PERCENT: u32 = 40;
/// What is known fades: each probe's weight is 16 times its next one's share of the sum.
const FADE: u32 = 16;
/// Rings around a page: to 4, to 8, and to 16 pages.
const RINGS: usize = 3;

#[derive(Debug, Clone, Copy, Default)]
struct Probe {
    block: u64,
    began: u64,
    /// The page whose fault began it, counted in its block.
    origin: u32,
    /// Pages that could be asked for, as bits.
    candidates: u16,
    /// Those that were.
    asked: u16,
    active: bool,
}

/// Sums that fade, in sixteenths of pages.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    asked: u32,
    candidates: u32,
}

impl Share {
    fn add(&mut self, asked: u32, candidates: u32) {
        self.asked = self.asked - self.asked / FADE + asked * FADE;
        self.candidates = self.candidates - self.candidates / FADE + candidates * FADE;
    }

    fn is_worth_it(self) -> bool {
        self.candidates > 0 && self.asked * 100 >= self.candidates * WORTH_PERCENT
    }
}

/// What is known of an address space's neighbours.
#[derive(Debug)]
pub struct FaultAround {
    probes: [Probe; PROBES],
    shares: [Share; RINGS],
    faults: u64,
    until_probe: u32,
    ended: u32,
    random: u64,
}

impl Default for FaultAround {
    fn default() -> Self {
        FaultAround {
            probes: [Probe::default(); PROBES],
            shares: [Share::default(); RINGS],
            faults: 0,
            until_probe: INTERVAL_AT_FIRST,
            ended: 0,
            random: 0,
        }
    }
}

impl FaultAround {
    /// What to bring in at a fault on `page`; it is always in the range. `swapped` says which pages
    /// of a block are swapped out, as bits.
    pub fn advise(
        &mut self,
        page: VirtualPage,
        swapped: impl FnOnce(PageRange) -> u16,
    ) -> PageRange {
        let alone = PageRange {
            start: page,
            end: page.plus(1),
        };
        self.faults += 1;
        let (block, origin) = (page.0 / BLOCK, (page.0 % BLOCK) as u32);
        let probe = &mut self.probes[block as usize % PROBES];
        if probe.active && self.faults - probe.began > PROBE_FAULTS {
            probe.active = false;
            let ended = *probe;
            self.learn(&ended);
        }
        let probe = &mut self.probes[block as usize % PROBES];
        if probe.active && probe.block == block {
            probe.asked |= 1 << origin;
            return alone;
        }
        self.until_probe = self.until_probe.saturating_sub(1);
        if !probe.active && self.until_probe == 0 {
            *probe = Probe {
                block,
                began: self.faults,
                origin,
                candidates: swapped(PageRange::around(page, BLOCK)) & !(1 << origin),
                asked: 0,
                active: true,
            };
            self.until_probe = self.interval();
            return alone;
        }
        let wanted = self.shares.iter().take_while(|share| share.is_worth_it());
        match wanted.count() {
            0 => alone,
            rings => PageRange::around(page, 2 << rings),
        }
    }

    /// Faults until the next probe: irregular, so that no pattern of the program's is always met
    /// at the same place.
    fn interval(&mut self) -> u32 {
        let mean = if self.ended < ENOUGH {
            INTERVAL_AT_FIRST
        } else {
            INTERVAL
        };
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        mean / 2 + (self.random >> 33) as u32 % mean
    }

    fn learn(&mut self, probe: &Probe) {
        self.ended = self.ended.saturating_add(1);
        let mut inner = 0;
        for (ring, share) in self.shares.iter_mut().enumerate() {
            let size = 4u32 << ring;
            let pages = (((1u32 << size) - 1) << (probe.origin / size * size)) as u16;
            let only = pages & !inner;
            inner = pages;
            share.add(
                (probe.asked & probe.candidates & only).count_ones(),
                (probe.candidates & only).count_ones(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// An address space whose pages stay once they were brought in.
    #[derive(Default)]
    struct Model {
        around: FaultAround,
        resident: HashSet<u64>,
    }

    impl Model {
        /// Touches a page; says how many pages came in.
        fn touch(&mut self, page: u64) -> u64 {
            if self.resident.contains(&page) {
                return 0;
            }
            let resident = &self.resident;
            let advice = self.around.advise(VirtualPage(page), |block| {
                (0..16)
                    .filter(|step| !resident.contains(&(block.start.0 + step)))
                    .fold(0, |swapped, step| swapped | 1 << step)
            });
            let pages = advice.start.0..advice.end.0;
            assert!(pages.contains(&page));
            self.resident.extend(pages);
            advice.pages()
        }
    }

    /// Page numbers below `below` in no order.
    fn scattered(below: u64) -> impl Iterator<Item = u64> {
        (1..20_000u64).map(move |step| step.wrapping_mul(0x9e37_79b9_7f4a_7c15) % below)
    }

    #[test]
    fn random_access_brings_in_single_pages() {
        let mut model = Model::default();
        for page in scattered(1 << 24) {
            assert!(model.touch(page) <= 1);
        }
    }

    /// Visits groups of `size` pages in no order, the pages of each in a row.
    fn last_window_of_groups(size: u64) -> u64 {
        let mut model = Model::default();
        let mut last = 0;
        for group in scattered(1 << 24) {
            for offset in 0..size {
                last = match model.touch(group * BLOCK + offset) {
                    0 | 1 => last,
                    pages => pages,
                };
            }
        }
        last
    }

    #[test]
    fn windows_are_as_large_as_what_is_used_together() {
        assert_eq!(last_window_of_groups(4), 4);
        assert_eq!(last_window_of_groups(8), 8);
        assert_eq!(last_window_of_groups(16), 16);
    }

    #[test]
    fn windows_shrink_when_access_turns_random() {
        let mut model = Model::default();
        (0..5_000).for_each(|page| {
            model.touch(page);
        });
        assert!(model.touch(1 << 30) > 1);
        let wide = scattered(1 << 32)
            .skip(2_000)
            .filter(|page| model.touch(page + (1 << 31)) > 1)
            .count();
        assert!(wide < 2_000, "{wide}");
    }

    #[test]
    fn pages_that_cannot_be_asked_for_do_not_count_against_a_window() {
        let mut around = FaultAround::default();
        // Only the first four pages of each block are ever swapped out.
        for block in 0..5_000u64 {
            for offset in 0..4 {
                let not_yet = 0xf & !((1u16 << offset) - 1);
                around.advise(VirtualPage(block * BLOCK + offset), |_| not_yet);
            }
        }
        let advice = around.advise(VirtualPage(1 << 30), |_| 0xf);
        assert_eq!(advice.pages(), 4);
    }
}
