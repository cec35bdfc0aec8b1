//! Fault-around: how many neighbours of a faulting page to bring in with it.
//!
//! User space cannot read the accessed bit of pages that were brought in by readahead. So some blocks
//! of pages are *probed*: for a while, their faults bring in single pages, and the share of the block's
//! other pages that fault meanwhile is what fault-around would have saved. Separate shares for the
//! aligned 4, 8 and 16 pages around the fault decide how many to bring in. Under random access no share
//! reaches the threshold.

use crate::page::{PageRange, VirtualPage};

/// Pages in a block, and the largest window.
const BLOCK: u64 = 16;
/// Maximum number of concurrent probes. More measures more faults and takes more memory per address
/// space.
const PROBES: usize = 64;
/// Duration of a probe in faults. It must be well below the faults between two evictions of a page, or
/// every neighbour would appear to be wanted.
const PROBE_FAULTS: u64 = 128;
/// Mean number of faults outside probed blocks between two probes: at first, and after [`ENOUGH`]
/// probes have ended. A larger interval costs fewer single-page faults and adapts later.
const INTERVAL_AT_FIRST: u32 = 4;
const INTERVAL: u32 = 16;
const ENOUGH: u32 = 32;
/// Percentage of faulting pages from which a ring of neighbours is brought in. A higher value brings in
/// fewer pages that are never touched, and saves fewer faults.
const WORTH_PERCENT: u32 = 55;
/// The sums decay by 1/`DECAY` per probe. A larger value averages over more probes and adapts later.
const DECAY: u32 = 16;
/// Rings around a page: up to 4, 8, and 16 pages.
const RINGS: usize = 3;

#[derive(Debug, Clone, Copy, Default)]
struct Probe {
    block: u64,
    /// Fault count at the start.
    began: u64,
    /// Index in the block of the page whose fault started the probe.
    origin: u32,
    /// Bitmap of the pages that can fault.
    candidates: u16,
    /// Bitmap of the pages that faulted.
    faulted: u16,
    active: bool,
}

/// Decaying sums over probes of one ring, in units of 1/16 page.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    faulted: u32,
    candidates: u32,
}

impl Share {
    fn add(&mut self, faulted: u32, candidates: u32) {
        self.faulted = self.faulted - self.faulted / DECAY + faulted * DECAY;
        self.candidates = self.candidates - self.candidates / DECAY + candidates * DECAY;
    }

    fn is_worth_it(self) -> bool {
        self.candidates > 0 && self.faulted * 100 >= self.candidates * WORTH_PERCENT
    }
}

/// The fault-around statistics of one address space, part of its readahead state.
#[derive(Debug)]
pub(crate) struct FaultAround {
    probes: [Probe; PROBES],
    shares: [Share; RINGS],
    /// Faults so far.
    faults: u64,
    /// Faults until the next probe.
    until_probe: u32,
    /// Probes that ended.
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
    /// The range to bring in at a fault on `page`, which it contains. `swapped` returns a bitmap of the
    /// swapped-out pages of a block.
    pub(crate) fn advise(
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
            probe.faulted |= 1 << origin;
            return alone;
        }
        self.until_probe = self.until_probe.saturating_sub(1);
        if !probe.active && self.until_probe == 0 {
            *probe = Probe {
                block,
                began: self.faults,
                origin,
                candidates: swapped(PageRange::around(page, BLOCK)) & !(1 << origin),
                faulted: 0,
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

    /// Faults until the next probe: random, so that probes do not lock onto a periodic access pattern.
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
                (probe.faulted & probe.candidates & only).count_ones(),
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
        /// Touches a page. Returns the number of pages brought in.
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

    /// Pseudo-random page numbers below `below`.
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

    /// Visits groups of `size` pages in random order, the pages of each sequentially.
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
    fn pages_that_cannot_fault_do_not_count_against_a_window() {
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
