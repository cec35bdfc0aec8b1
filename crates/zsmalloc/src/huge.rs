//! Huge pages: filling whole blocks, and splitting them again.
//!
//! A block that is filled at once costs the system one fault instead of one for each page, and
//! giving it back whole costs a fraction. The price is memory that no zspage uses yet, or any more:
//! *spare* pages. They are counted as resident, new zspages take them before anything else, and a
//! block is filled only if there are few of them. Where frees leave many, the sparsest huge pages
//! are split, but not while a burst of frees may empty them.

use std::ops::Range;

use crate::{
    geometry::UNIT_PAGES,
    pool::Pool,
    source::PageSource,
    sync::{atomic::Ordering, lock},
};

/// More spare pages than this part of the pool are too many, whoever looks; but that may be the
/// middle of a burst of frees, so it has to last for some milliseconds.
const MUCH_SPARE: usize = 8;
const BURST_MILLISECONDS: u64 = 50;
/// The one who finds that it has lasted splits so many stretches.
const SPLITS_AT_ONCE: usize = 4;

impl<S: PageSource> Pool<S> {
    /// Whether blocks may be filled by huge pages now.
    pub(crate) fn may_fill(&self) -> bool {
        // Half of the new one, as it is on average until the next.
        let spare = self.arenas.spare_pages() + self.arenas.block_pages() / 2;
        self.spare_part > 0
            && spare.saturating_mul(self.spare_part) <= self.resident_pages.load(Ordering::Relaxed)
    }

    /// Fills a block, named by its units, that has no memory and is in nobody else's use, with a
    /// huge page, if one is to be had.
    pub(crate) fn fill(&self, stretch: usize, block: &Range<usize>) -> bool {
        let run = self.run_in(stretch, &(block.start * UNIT_PAGES..block.end * UNIT_PAGES));
        let filled = self.source.populate_huge(run);
        if filled {
            self.resident_pages.fetch_add(run.pages, Ordering::Relaxed);
        }
        filled
    }

    /// Pages in huge pages.
    pub(crate) fn huge_pages(&self) -> usize {
        (0..self.arenas.stretches_used())
            .map(|index| self.arenas.stretch(index).huge_pages())
            .sum()
    }

    /// Whether more than one page in `part` is spare.
    fn spare_exceeds(&self, part: usize) -> bool {
        self.arenas.spare_pages() > self.resident_pages.load(Ordering::Relaxed) / part
    }

    /// Gives free parts of huge pages back, the sparsest first, until no more than
    /// [`Config::spare_part`](crate::Config::spare_part) says is left. Costs next to nothing if it
    /// is not more. Returns how many pages were given back.
    pub fn trim_spare(&self) -> usize {
        self.limit_spare(1)
    }

    /// The same, if there is `times` as much.
    pub(crate) fn limit_spare(&self, times: usize) -> usize {
        let part = self.spare_part;
        if part == 0 || !self.spare_exceeds(part.div_ceil(times)) {
            return 0;
        }
        self.split_sparsest(|| self.spare_exceeds(part), 1, usize::MAX)
    }

    /// Splits all huge pages with `least` spare pages or more. Returns how many pages were given
    /// back.
    pub(crate) fn give_back_spare(&self, least: usize) -> usize {
        self.split_sparsest(|| self.arenas.spare_pages() > 0, least, usize::MAX)
    }

    /// Looks whether there has been much spare memory for some time.
    pub(crate) fn watch_spare(&self) {
        if !self.spare_exceeds(MUCH_SPARE) {
            if self.much_spare_since.load(Ordering::Relaxed) != 0 {
                self.much_spare_since.store(0, Ordering::Relaxed);
            }
            return;
        }
        let now = self.created.elapsed().as_millis() as u64 + 1;
        match self.much_spare_since.load(Ordering::Relaxed) {
            0 => self.much_spare_since.store(now, Ordering::Relaxed),
            since if now.saturating_sub(since) < BURST_MILLISECONDS => {}
            _ => {
                let too_much = || self.spare_exceeds(2 * MUCH_SPARE);
                self.split_sparsest(too_much, 1, SPLITS_AT_ONCE);
            }
        }
    }

    /// Splits huge pages with at least `least` spare pages, those with the most first, in at most
    /// `most` stretches, as long as there is `too_much`. Returns how many pages were given back.
    #[cold]
    fn split_sparsest(&self, too_much: impl Fn() -> bool, least: usize, most: usize) -> usize {
        let whole = self.arenas.block_pages();
        let (mut pages, mut splits) = (0, 0);
        for least in [whole * 3 / 4, whole / 2, whole / 4, least] {
            for index in 0..self.arenas.stretches_used() {
                if splits == most || !too_much() {
                    return pages;
                }
                // A look without the lock: it is taken only where it may be worth it.
                let stretch = self.arenas.stretch(index);
                let splits_some = |block| stretch.free(&block).spare >= least;
                if self.arenas.blocks().any(splits_some) {
                    let given_back = self.split_in(index, least);
                    pages += given_back;
                    splits += usize::from(given_back > 0);
                }
            }
        }
        pages
    }

    /// Splits the huge pages of a stretch of which at least `least` pages are spare, and gives these
    /// back.
    fn split_in(&self, index: usize, least: usize) -> usize {
        let Some(owner) = self.arenas.stretch(index).owner() else {
            return 0;
        };
        let shard = &self.shards[owner];
        let Some(batch) = lock(&shard.runs).take_spare(&self.arenas, index, least) else {
            return 0;
        };
        for page in batch.splits() {
            self.source
                .split_huge(self.run_in(index, &(page..page + 1)));
            self.huge_splits.fetch_add(1, Ordering::Relaxed);
        }
        let (mut pages, mut next) = (0, Some(batch));
        while let Some(batch) = next {
            let given_back = self.discard_batches(shard, std::iter::once(&batch));
            if given_back == 0 {
                break;
            }
            pages += given_back;
            // Whoever gave all freed memory back meanwhile passed over what was busy.
            next = lock(&shard.runs).take_giving_in(&self.arenas, index);
        }
        pages
    }
}
