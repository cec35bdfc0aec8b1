//! Runs of pages for new zspages, and returning freed runs to the kernel.
//!
//! A freed run is *warm*: it is resident and serves the next zspage of its length. When a shard has
//! more warm pages than it may retain, they are all discarded in one batch, with no lock held, and
//! become *cold*. A batch takes all free pages of an extent, in address order, with neighbours
//! merged: the kernel discards one long run for less than half the time of many short ones. Huge
//! pages are handled in `huge.rs`.

use std::ops::Range;

use crate::{
    arena::Arena,
    error::AllocError,
    geometry::{MAX_SHARDS, PAGE_SIZE, PageNumber},
    pool::{Pool, Shard},
    released::Released,
    runs::{Batch, Cold, RunLists, Taken},
    source::{PageRun, PageSource, SourceError},
    sync::{MutexGuard, atomic::Ordering, lock, try_lock},
};

/// Extents that one discard takes. On the stack, as returning memory must not need any; few, so
/// that several threads find work.
const DISCARD_EXTENTS: usize = 8;
/// Runs that one call of the source discards. Loom's threads have small stacks.
const DISCARD_RUNS: usize = if cfg!(loom) { 16 } else { 512 };

/// Pages that a shard may retain in however small a pool,
const MIN_RETAINED_PAGES: usize = 64;
/// and otherwise 1/`RETAINED_PART` of the pool's resident pages.
const RETAINED_PART: usize = 64;
/// A trim splits a huge page only to return more than 1/`SPARE_NOT_WORTH_IT` of it.
const SPARE_NOT_WORTH_IT: usize = 32;
/// The drainer waits for a burst of frees to end, so that runs grow long, unless 1/`MUCH` of the
/// pool's memory waits to be returned.
const MUCH: usize = 4;

impl<S: PageSource> Pool<S> {
    /// Takes a run for a new zspage.
    pub(crate) fn take_run(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        match self.try_take_run(shard, pages) {
            Ok(page) => Ok(page),
            Err(error) => {
                // Retained memory may make the difference; what is spare in huge pages is no address space.
                let mut gained = self.trim();
                if error != AllocError::RangeFull {
                    gained += self.give_back_spare(1);
                }
                if gained == 0 {
                    return Err(error);
                }
                self.try_take_run(shard, pages)
            }
        }
    }

    fn try_take_run(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        let arenas = &self.arenas;
        let own = &self.shards[shard].runs;
        if let Some(page) = lock(own).take_warm(arenas, pages) {
            return Ok(page);
        }
        if arenas.spare_pages() > 0 {
            // Spare pages, of any shard, need no memory.
            let found = self.take_elsewhere(shard, |runs| runs.take_warm(arenas, pages));
            if let Some(page) = found {
                return Ok(page);
            }
        }
        // A statement of its own, so that the lock is dropped.
        let cold = lock(own).take_cold(arenas, pages, self.may_fill());
        if let Some(cold) = cold {
            return self.supply(cold);
        }
        match self.take_elsewhere(shard, |runs| runs.take(arenas, pages, false)) {
            Some(taken) => self.supply_taken(taken),
            None => self.start_arena(shard, pages),
        }
    }

    fn take_elsewhere<T>(
        &self,
        shard: usize,
        mut take: impl FnMut(&mut RunLists) -> Option<T>,
    ) -> Option<T> {
        (0..self.shards.len())
            .filter(|&other| other != shard)
            .find_map(|other| take(&mut *try_lock(&self.shards[other].runs)?))
    }

    /// Commits a run that was taken, if it is not resident.
    fn supply_taken(&self, taken: Taken) -> Result<PageNumber, AllocError> {
        match taken {
            Taken::Warm(page) => Ok(page),
            Taken::Cold(cold) => self.supply(cold),
        }
    }

    /// Commits the pages of a run that are not resident.
    fn supply(&self, mut cold: Cold) -> Result<PageNumber, AllocError> {
        let page = cold.page;
        let (arena, run) = self.run_of(page);
        let runs = &self.shards[arena.owner()].runs;
        if let Some((extent, blocks)) = cold.filling(&self.arenas) {
            let filled = blocks.map(|block| block.filter(|block| self.fill(extent, block)));
            lock(runs).end_fill(&self.arenas, &mut cold, &filled);
        }
        if cold.lacking.is_empty() {
            return Ok(page);
        }
        let lacking = self.run_in(arena.extent(), &cold.lacking);
        if let Err(error) = self.source.commit(lacking) {
            lock(runs).put_refused(&self.arenas, arena, run, &cold);
            return Err(error.into());
        }
        self.resident_pages
            .fetch_add(cold.lacking.len(), Ordering::Relaxed);
        Ok(page)
    }

    /// Makes an arena for runs of `pages` pages and takes one.
    fn start_arena(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        let arenas = &self.arenas;
        let own = &self.shards[shard].runs;
        let begun = lock(own).begin_arena(arenas, pages);
        let (extent, units) = match begun {
            Some(begun) => begun,
            None => {
                let extent = arenas.add_extent()?;
                let mut runs = lock(own);
                runs.open(arenas, extent, shard);
                runs.begin_arena(arenas, pages)
                    .expect("a new extent has room")
            }
        };
        // No lock held: the heap may be slow, or be backed by the owner of this pool.
        let place = (extent, units.start);
        let made = arenas.add(extent, units, pages, shard);
        let fill = self.may_fill();
        let mut runs = lock(own);
        runs.end_arena(arenas, place, made.as_ref().ok().copied());
        made?;
        let taken = runs.take(arenas, pages, fill);
        drop(runs);
        self.supply_taken(taken.expect("an arena has a run"))
    }

    /// Pages of an extent, counted from its first.
    pub(crate) fn run_in(&self, extent: usize, pages: &Range<usize>) -> PageRun {
        let first = self.arenas.first_page(extent).0 + pages.start as u32;
        self.run(PageNumber(first), pages.len())
    }

    fn run_of(&self, page: PageNumber) -> (&Arena, usize) {
        let arena = self.arenas.arena_of(page).expect("runs lie in arenas");
        (arena, arena.run_at(page).expect("a run starts here"))
    }

    /// Makes zspages that were removed from their bins free runs.
    pub(crate) fn release(&self, mut released: Released) {
        let mut touched = [false; MAX_SHARDS];
        let mut held: Option<(usize, MutexGuard<'_, RunLists>)> = None;
        while let Some(page) = released.pop(&self.arenas) {
            let (arena, run) = self.run_of(page);
            let owner = arena.owner();
            if held.as_ref().is_none_or(|(shard, _)| *shard != owner) {
                // Never two at a time.
                drop(held.take());
                held = Some((owner, lock(&self.shards[owner].runs)));
            }
            if let Some((_, runs)) = &mut held {
                runs.put_freed(&self.arenas, arena, run);
                touched[owner] = runs.warm_pages() > self.retained_now();
            }
        }
        drop(held);
        for (shard, _) in self.shards.iter().zip(touched).filter(|(_, full)| *full) {
            let waiting = lock(&shard.runs).warm_pages();
            let may_wait = waiting * PAGE_SIZE <= self.deferred_share;
            if !(may_wait && self.drain_signal.leave_memory()) {
                self.discard_warm(shard);
            }
        }
        self.watch_spare();
    }

    /// Pages of freed runs that still have their memory.
    pub(crate) fn warm_pages(&self) -> usize {
        let warm = |shard: &Shard| lock(&shard.runs).warm_pages();
        self.shards.iter().map(warm).sum()
    }

    /// Whether much of the pool's memory is that of freed runs.
    pub(crate) fn much_is_warm(&self) -> bool {
        self.warm_pages() > self.resident_pages.load(Ordering::Relaxed) / MUCH
    }

    /// Warm pages that a shard may retain now.
    fn retained_now(&self) -> usize {
        let part = self.resident_pages.load(Ordering::Relaxed) / RETAINED_PART;
        self.retained_pages.min(part.max(MIN_RETAINED_PAGES))
    }

    /// Returns all memory that holds no object to the kernel: retained runs and empty zspages, and
    /// free parts of huge pages unless they are very small. Returns the number of pages.
    pub fn trim(&self) -> usize {
        let least = (self.arenas.block_pages() / SPARE_NOT_WORTH_IT).max(1);
        self.trim_classes(0..self.classes().len()) + self.give_back_spare(least)
    }

    /// Like [`Pool::trim`], but takes empty zspages of some classes only, and splits no huge page.
    pub(crate) fn trim_classes(&self, classes: Range<usize>) -> usize {
        let before = self.resident_pages.load(Ordering::Relaxed);
        self.release_empty(classes);
        let discarded = self.discard_all_warm();
        let after = self.resident_pages.load(Ordering::Relaxed);
        discarded.max(before.saturating_sub(after))
    }

    /// Releases the retained empty zspages of some classes.
    pub(crate) fn release_empty(&self, classes: Range<usize>) {
        let mut released = Released::new();
        for (shard_index, shard) in self.shards.iter().enumerate() {
            for class_index in classes.clone() {
                let context = self.context(shard_index, class_index);
                let emptied = shard.bins[class_index].state.lock().trim(&context);
                if let Some(page) = emptied {
                    released.push(&self.arenas, page);
                }
            }
        }
        self.release(released);
    }

    /// Discards all freed runs; returns the number of pages.
    pub(crate) fn discard_all_warm(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| self.discard_warm(shard))
            .sum()
    }

    /// Discards some freed runs; returns the number of pages, zero if there are no more.
    pub(crate) fn discard_some(&self) -> usize {
        let mut parts = self.shards.iter().map(|shard| self.discard_part(shard));
        parts.find(|&pages| pages > 0).unwrap_or(0)
    }

    /// Discards a shard's freed runs; returns the number of pages.
    fn discard_warm(&self, shard: &Shard) -> usize {
        let parts = std::iter::repeat_with(|| self.discard_part(shard));
        parts.take_while(|&pages| pages > 0).sum()
    }

    /// Discards freed runs in some extents of a shard; returns the number of pages, zero if there
    /// are none or it failed.
    fn discard_part(&self, shard: &Shard) -> usize {
        let mut taken = [None; DISCARD_EXTENTS];
        {
            let mut runs = lock(&shard.runs);
            taken.fill_with(|| runs.take_giving(&self.arenas));
        }
        if taken[0].is_none() {
            return 0;
        }
        self.discard_batches(shard, taken.iter().flatten())
    }

    /// Discards pages that were removed from the sets of a shard; returns their number, zero if it
    /// failed.
    pub(crate) fn discard_batches<'a>(
        &self,
        shard: &Shard,
        batches: impl Iterator<Item = &'a Batch> + Clone,
    ) -> usize {
        let result = self.discard_pages(batches.clone());
        let mut runs = lock(&shard.runs);
        let mut pages = 0;
        for batch in batches {
            // What could not be discarded is still resident: keep it for reuse and try again later.
            runs.end_batch(&self.arenas, batch, result.is_ok());
            pages += batch.pages.count();
        }
        drop(runs);
        if result.is_err() {
            self.discard_failures.fetch_add(1, Ordering::Relaxed);
            return 0;
        }
        self.resident_pages.fetch_sub(pages, Ordering::Relaxed);
        pages
    }

    /// Passes pages to the source, with neighbours merged.
    fn discard_pages<'a>(
        &self,
        batches: impl Iterator<Item = &'a Batch>,
    ) -> Result<(), SourceError> {
        let mut merged = [PageRun {
            start: self.base,
            pages: 0,
        }; DISCARD_RUNS];
        let mut merged_count = 0;
        for batch in batches {
            for part in batch.pages.parts() {
                if merged_count == DISCARD_RUNS {
                    self.discard_merged(&merged)?;
                    merged_count = 0;
                }
                merged[merged_count] = self.run_in(batch.extent, &part);
                merged_count += 1;
            }
        }
        self.discard_merged(&merged[..merged_count])
    }

    fn discard_merged(&self, merged: &[PageRun]) -> Result<(), SourceError> {
        // SAFETY: the runs lie in the pool's reservation and were removed from all sets, so no
        // zspage is in them and no other thread can take them.
        unsafe { self.source.discard(merged) }
    }
}
