//! Huge pages: filling whole blocks, and splitting them again.
//!
//! Populating a block with a huge page takes one fault instead of one for each page, and returning
//! it whole is much cheaper. The price is *spare* pages: resident pages of huge pages that no
//! zspage uses. They count as resident, new zspages take them first, and a block is filled only
//! while there are few. Where frees leave many, the sparsest huge pages are split, but not during a
//! burst of frees that may empty them.

use std::{ops::Range, panic::AssertUnwindSafe};

use crate::{
    geometry::{PAGE_SIZE, UNIT_PAGES},
    pool::Pool,
    source::{HugePageLimit, PageSource},
    sync::{atomic::Ordering, lock},
};

/// Frees split huge pages when more than 1/`MUCH_SPARE` of the pool is spare for
/// `BURST_MILLISECONDS`: for a shorter time it may be the middle of a burst of frees.
const MUCH_SPARE: usize = 8;
const BURST_MILLISECONDS: u64 = 50;
/// Extents that one such free splits at most.
const SPLITS_AT_ONCE: usize = 4;

impl<S: PageSource> Pool<S> {
    /// Asks `limit` before the pool grows by a huge page from now on.
    ///
    /// # Panics
    ///
    /// If the pool has such a limit.
    pub fn limit_huge_pages(&self, limit: Box<dyn HugePageLimit>) {
        let is_first = self.huge_page_limit.set(AssertUnwindSafe(limit)).is_ok();
        assert!(is_first, "a pool has one limit of huge pages");
    }

    /// Whether blocks may be filled by huge pages now.
    pub(crate) fn may_fill(&self) -> bool {
        // Count half of the new one as spare, its average until the next.
        let spare = self.arenas.spare_pages() + self.arenas.block_pages() / 2;
        self.spare_part > 0
            && spare.saturating_mul(self.spare_part) <= self.resident_pages.load(Ordering::Relaxed)
    }

    /// Populates a block, given by its units, that is not resident and not in use with a huge page,
    /// if the source has one.
    pub(crate) fn fill(&self, extent: usize, block: &Range<usize>) -> bool {
        let run = self.run_in(extent, &(block.start * UNIT_PAGES..block.end * UNIT_PAGES));
        let (limit, bytes) = (self.huge_page_limit.get(), run.pages * PAGE_SIZE);
        if limit.is_some_and(|limit| !limit.reserve(bytes)) {
            return false;
        }
        let filled = self.source.populate_huge(run);
        if filled {
            self.resident_pages.fetch_add(run.pages, Ordering::Relaxed);
        }
        if let Some(limit) = limit {
            limit.release(bytes);
        }
        filled
    }

    /// Pages in huge pages.
    pub(crate) fn huge_pages(&self) -> usize {
        (0..self.arenas.extents_used())
            .map(|index| self.arenas.extent(index).huge_pages())
            .sum()
    }

    /// Whether more than one page in `part` is spare.
    fn spare_exceeds(&self, part: usize) -> bool {
        self.arenas.spare_pages() > self.resident_pages.load(Ordering::Relaxed) / part
    }

    /// Returns free parts of huge pages to the kernel, splitting the sparsest first, until they are
    /// within [`Config::spare_part`](crate::Config::spare_part). Cheap if they already are. Returns
    /// the number of pages.
    pub fn trim_spare(&self) -> usize {
        self.limit_spare(1)
    }

    /// As [`trim_spare`](Self::trim_spare), if they exceed `times` that limit.
    pub(crate) fn limit_spare(&self, times: usize) -> usize {
        let part = self.spare_part;
        if part == 0 || !self.spare_exceeds(part.div_ceil(times)) {
            return 0;
        }
        self.split_sparsest(|| self.spare_exceeds(part), 1, usize::MAX)
    }

    /// Splits all huge pages with at least `least` spare pages. Returns the number of pages
    /// returned to the kernel.
    pub(crate) fn give_back_spare(&self, least: usize) -> usize {
        self.split_sparsest(|| self.arenas.spare_pages() > 0, least, usize::MAX)
    }

    /// Splits some huge pages if there has been much spare memory for some time.
    pub(crate) fn watch_spare(&self) {
        if !self.spare_exceeds(MUCH_SPARE) {
            if self.spare_excess_since.load(Ordering::Relaxed) != 0 {
                self.spare_excess_since.store(0, Ordering::Relaxed);
            }
            return;
        }
        let now = self.created.elapsed().as_millis() as u64 + 1;
        match self.spare_excess_since.load(Ordering::Relaxed) {
            0 => self.spare_excess_since.store(now, Ordering::Relaxed),
            since if now.saturating_sub(since) < BURST_MILLISECONDS => {}
            _ => {
                let too_much = || self.spare_exceeds(2 * MUCH_SPARE);
                self.split_sparsest(too_much, 1, SPLITS_AT_ONCE);
            }
        }
    }

    /// Splits huge pages with at least `least` spare pages, those with the most first, in at most
    /// `most` extents, while there is `too_much`. Returns the number of pages returned to the
    /// kernel.
    #[cold]
    fn split_sparsest(&self, too_much: impl Fn() -> bool, least: usize, most: usize) -> usize {
        let whole = self.arenas.block_pages();
        let (mut pages, mut splits) = (0, 0);
        for least in [whole * 3 / 4, whole / 2, whole / 4, least] {
            for index in 0..self.arenas.extents_used() {
                if splits == most || !too_much() {
                    return pages;
                }
                // Check without the lock first.
                let extent = self.arenas.extent(index);
                let splits_some = |block| extent.free(&block).spare >= least;
                if self.arenas.blocks().any(splits_some) {
                    let given_back = self.split_in(index, least);
                    pages += given_back;
                    splits += usize::from(given_back > 0);
                }
            }
        }
        pages
    }

    /// Splits the huge pages of an extent with at least `least` spare pages and returns these to
    /// the kernel.
    fn split_in(&self, index: usize, least: usize) -> usize {
        let Some(owner) = self.arenas.extent(index).owner() else {
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
            // A thread that returned all freed memory meanwhile skipped the busy extent.
            next = lock(&shard.runs).take_giving_in(&self.arenas, index);
        }
        pages
    }
}
