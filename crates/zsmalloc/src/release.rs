//! Runs of pages: taking them for new zspages, and giving the memory of freed ones back.
//!
//! A freed run is *warm*: it still has its memory, and serves the next zspage of its length first.
//! When a shard has more warm pages than it may retain, all of them are discarded in one batch,
//! with no lock held, and become *cold*: free addresses.

use crate::{
    class::MAX_CHAIN_PAGES,
    error::AllocError,
    pool::Pool,
    source::{PageRun, PageSource, SourceError},
    sync::{atomic::Ordering, lock, try_lock},
    zspage::{Arenas, Link, PageNumber},
};

/// Lists of runs, by length.
#[derive(Debug, Clone, Copy)]
struct ByLength([Link; MAX_CHAIN_PAGES + 1]);

impl ByLength {
    const EMPTY: Self = Self([Link::NONE; MAX_CHAIN_PAGES + 1]);
}

/// The free runs of a shard.
#[derive(Debug)]
pub(crate) struct RunLists {
    warm: ByLength,
    warm_pages: usize,
    cold: ByLength,
}

impl RunLists {
    pub(crate) fn new() -> Self {
        Self {
            warm: ByLength::EMPTY,
            warm_pages: 0,
            cold: ByLength::EMPTY,
        }
    }

    fn take_warm(&mut self, arenas: &Arenas, pages: usize) -> Option<PageNumber> {
        let page = arenas.pop(&mut self.warm.0[pages])?;
        self.warm_pages -= pages;
        Some(page)
    }
}

/// Zspages that were taken out of service and are to be released.
#[derive(Debug)]
pub(crate) struct Released {
    runs: ByLength,
    pages: usize,
}

impl Released {
    pub(crate) fn new() -> Self {
        Self {
            runs: ByLength::EMPTY,
            pages: 0,
        }
    }

    pub(crate) fn push(&mut self, arenas: &Arenas, page: PageNumber, pages: usize) {
        arenas.push(&mut self.runs.0[pages], page);
        self.pages += pages;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages == 0
    }
}

/// How many runs are given to the source at once. They are collected on the stack: giving memory
/// back must not need any.
const DISCARD_BATCH: usize = 128;

impl<S: PageSource> Pool<S> {
    /// Takes a run for a new zspage.
    pub(crate) fn take_run(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        match self.try_take_run(shard, pages) {
            Ok(page) => Ok(page),
            Err(error) => {
                // Something held back may make the difference.
                if self.trim() == 0 {
                    return Err(error);
                }
                self.try_take_run(shard, pages)
            }
        }
    }

    fn try_take_run(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        let own = &self.shards[shard].runs;
        let cold = {
            let mut runs = lock(own);
            if let Some(page) = runs.take_warm(&self.arenas, pages) {
                return Ok(page);
            }
            self.arenas.pop(&mut runs.cold.0[pages])
        };
        let cold = cold.or_else(|| self.take_cold_elsewhere(shard, pages));
        let page = match cold {
            Some(page) => page,
            None => self.start_arena(shard, pages)?,
        };
        if let Err(error) = self.source.commit(self.run(page, pages)) {
            self.arenas.push(&mut lock(own).cold.0[pages], page);
            return Err(error.into());
        }
        self.resident_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(page)
    }

    fn take_cold_elsewhere(&self, shard: usize, pages: usize) -> Option<PageNumber> {
        (0..self.shards.len())
            .filter(|&other| other != shard)
            .find_map(|other| {
                let mut runs = try_lock(&self.shards[other].runs)?;
                self.arenas.pop(&mut runs.cold.0[pages])
            })
    }

    /// Puts an arena to use for runs of `pages` pages, and takes the first.
    fn start_arena(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        let mut runs = self.arenas.add(pages)?.runs();
        let first = runs
            .next()
            .expect("an arena holds at least one run of any length");
        let mut lists = lock(&self.shards[shard].runs);
        for page in runs.rev() {
            self.arenas.push(&mut lists.cold.0[pages], page);
        }
        Ok(first)
    }

    /// Takes over zspages that no bin has any more.
    pub(crate) fn release(&self, released: Released) {
        let shard = self.current_shard();
        let mut runs = lock(&self.shards[shard].runs);
        runs.warm_pages += released.pages;
        for (pages, mut list) in released.runs.0.into_iter().enumerate() {
            while let Some(page) = self.arenas.pop(&mut list) {
                self.arenas.push(&mut runs.warm.0[pages], page);
            }
        }
        if runs.warm_pages > self.retained_pages {
            let warm = std::mem::replace(&mut runs.warm, ByLength::EMPTY);
            runs.warm_pages = 0;
            drop(runs);
            self.discard(shard, warm);
        }
    }

    /// Gives the memory of all pages that hold no object back: empty zspages that were held back
    /// for reuse. Returns how many pages that were.
    pub fn trim(&self) -> usize {
        let mut discarded = 0;
        for (shard_index, shard) in self.shards.iter().enumerate() {
            let mut released = Released::new();
            for (class_index, bin) in shard.bins.iter().enumerate() {
                let context = self.context(shard_index, class_index);
                let emptied = lock(&bin.state).trim(&context);
                if let Some(page) = emptied {
                    released.push(&self.arenas, page, context.class.pages());
                }
            }
            if !released.is_empty() {
                self.release(released);
            }
        }
        for (shard_index, shard) in self.shards.iter().enumerate() {
            let warm = {
                let mut runs = lock(&shard.runs);
                runs.warm_pages = 0;
                std::mem::replace(&mut runs.warm, ByLength::EMPTY)
            };
            discarded += self.discard(shard_index, warm);
        }
        discarded
    }

    /// Discards runs that nobody else can reach, and makes them cold runs of `shard`.
    fn discard(&self, shard: usize, warm: ByLength) -> usize {
        let mut discarded = 0;
        for (pages, mut list) in warm.0.into_iter().enumerate() {
            loop {
                let mut batch = [PageNumber(0); DISCARD_BATCH];
                let mut count = 0;
                while count < DISCARD_BATCH
                    && let Some(page) = self.arenas.pop(&mut list)
                {
                    batch[count] = page;
                    count += 1;
                }
                if count == 0 {
                    break;
                }
                discarded += self.discard_batch(shard, &mut batch[..count], pages);
            }
        }
        discarded
    }

    fn discard_batch(&self, shard: usize, batch: &mut [PageNumber], pages: usize) -> usize {
        batch.sort_unstable();
        let result = self.discard_runs(batch, pages);
        let mut runs = lock(&self.shards[shard].runs);
        match result {
            Ok(()) => {
                for &page in batch.iter().rev() {
                    self.arenas.push(&mut runs.cold.0[pages], page);
                }
                self.resident_pages
                    .fetch_sub(batch.len() * pages, Ordering::Relaxed);
                batch.len() * pages
            }
            Err(_) => {
                // They still have their memory: keep them for reuse, to be tried again later.
                self.discard_failures.fetch_add(1, Ordering::Relaxed);
                for &page in batch.iter().rev() {
                    self.arenas.push(&mut runs.warm.0[pages], page);
                }
                runs.warm_pages += batch.len() * pages;
                0
            }
        }
    }

    /// Hands runs, in address order, to the source, with neighbours merged.
    fn discard_runs(&self, batch: &[PageNumber], pages: usize) -> Result<(), SourceError> {
        let mut merged = [PageRun {
            start: self.base,
            pages: 0,
        }; DISCARD_BATCH];
        let mut count = 0;
        let mut end = None;
        for &page in batch {
            if end == Some(page.0) {
                merged[count - 1].pages += pages;
            } else {
                merged[count] = self.run(page, pages);
                count += 1;
            }
            end = Some(page.0 + pages as u32);
        }
        // SAFETY: the runs lie in the pool's reservation and were taken off all lists, so no
        // zspage is in them and only this thread knows them.
        unsafe { self.source.discard(&merged[..count]) }
    }
}
