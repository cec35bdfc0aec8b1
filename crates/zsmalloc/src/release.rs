//! Runs of pages: taking them for new zspages, and giving the memory of freed ones back.
//!
//! A freed run is *warm*: it still has its memory, and serves the next zspage of its length first.
//! When a shard has more warm pages than it may retain, all of them are discarded in one batch,
//! with no lock held, and become *cold*: free addresses. An arena keeps its free runs as bits, so
//! what is discarded comes in address order and neighbours are given back together: to the system,
//! one long run is less than half the work of its pages in small ones.

use std::ops::Range;

use crate::{
    PAGE_SIZE,
    arena::{Arena, Arenas, NOT_LISTED, RunBits},
    class::MAX_CHAIN_PAGES,
    error::AllocError,
    pool::{MAX_SHARDS, Pool, Shard},
    source::{PageRun, PageSource, SourceError},
    sync::{
        MutexGuard,
        atomic::{AtomicU32, Ordering},
        lock, try_lock,
    },
    zspage::{Link, NO_LINK, PageNumber},
};

/// Arenas with free runs of one kind, by the length of their runs, linked through the arenas. An
/// arena is on the list if it has such runs; it may stay on it when they are gone.
#[derive(Debug)]
struct ArenaLists {
    heads: [u32; MAX_CHAIN_PAGES + 1],
    next: fn(&Arena) -> &AtomicU32,
}

impl ArenaLists {
    fn new(next: fn(&Arena) -> &AtomicU32) -> Self {
        Self {
            heads: [NO_LINK; MAX_CHAIN_PAGES + 1],
            next,
        }
    }

    fn list(&mut self, arena: &Arena) {
        let next = (self.next)(arena);
        if next.load(Ordering::Relaxed) == NOT_LISTED {
            let head = &mut self.heads[arena.run_pages()];
            next.store(*head, Ordering::Relaxed);
            *head = arena.index();
        }
    }

    fn first<'a>(&self, arenas: &'a Arenas, pages: usize) -> Option<&'a Arena> {
        let head = self.heads[pages];
        (head != NO_LINK).then(|| {
            arenas
                .arena(head as usize)
                .expect("listed arenas are in use")
        })
    }

    fn pop<'a>(&mut self, arenas: &'a Arenas, pages: usize) -> Option<&'a Arena> {
        let arena = self.first(arenas, pages)?;
        let next = (self.next)(arena);
        self.heads[pages] = next.load(Ordering::Relaxed);
        next.store(NOT_LISTED, Ordering::Relaxed);
        Some(arena)
    }
}

/// The free runs of a shard.
#[derive(Debug)]
pub(crate) struct RunLists {
    warm: ArenaLists,
    warm_pages: usize,
    cold: ArenaLists,
}

/// A run that was taken, and whether it has memory.
struct Taken {
    page: PageNumber,
    warm: bool,
}

impl RunLists {
    pub(crate) fn new() -> Self {
        Self {
            warm: ArenaLists::new(|arena| &arena.next_warm),
            warm_pages: 0,
            cold: ArenaLists::new(|arena| &arena.next_cold),
        }
    }

    fn take(&mut self, arenas: &Arenas, pages: usize) -> Option<Taken> {
        while let Some(arena) = self.warm.first(arenas, pages) {
            if let Some(run) = arena.warm.pop() {
                self.warm_pages -= pages;
                return Some(Taken {
                    page: arena.page_of(run),
                    warm: true,
                });
            }
            self.warm.pop(arenas, pages);
        }
        while let Some(arena) = self.cold.first(arenas, pages) {
            if let Some(run) = arena.cold.pop() {
                return Some(Taken {
                    page: arena.page_of(run),
                    warm: false,
                });
            }
            self.cold.pop(arenas, pages);
        }
        None
    }

    fn put_warm(&mut self, arena: &Arena, run: usize) {
        arena.warm.insert(run);
        self.warm_pages += arena.run_pages();
        self.warm.list(arena);
    }

    fn put_cold(&mut self, arena: &Arena, runs: &RunBits) {
        arena.cold.insert_all(runs);
        self.cold.list(arena);
    }

    /// Takes all warm runs of some arena.
    fn take_warm_arena<'a>(&mut self, arenas: &'a Arenas) -> Option<(&'a Arena, RunBits)> {
        for pages in 1..=MAX_CHAIN_PAGES {
            while let Some(arena) = self.warm.pop(arenas, pages) {
                let runs = arena.warm.take_all();
                let count = count(&runs);
                if count > 0 {
                    self.warm_pages -= count * pages;
                    return Some((arena, runs));
                }
            }
        }
        None
    }
}

fn count(runs: &RunBits) -> usize {
    runs.iter().map(|bits| bits.count_ones() as usize).sum()
}

fn each(runs: &RunBits) -> impl Iterator<Item = usize> + '_ {
    runs.iter().enumerate().flat_map(|(word, &bits)| {
        let mut left = bits;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(word * 64 + bit)
        })
    })
}

/// Zspages that were taken out of service and are to be released, linked through their records.
#[derive(Debug)]
pub(crate) struct Released(Link);

impl Released {
    pub(crate) fn new() -> Self {
        Self(Link::NONE)
    }

    pub(crate) fn push(&mut self, arenas: &Arenas, page: PageNumber) {
        arenas.push(&mut self.0, page);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == Link::NONE
    }
}

/// How many arenas are discarded from, and how many runs given to the source, at once. They are
/// collected on the stack: giving memory back must not need any.
const DISCARD_ARENAS: usize = 16;
/// Loom's threads have small stacks.
const DISCARD_RUNS: usize = if cfg!(loom) { 16 } else { 512 };

/// However small the pool is, a shard may hold back so many pages.
const MIN_RETAINED_PAGES: usize = 64;
/// And otherwise this part of what the pool holds.
const RETAINED_PART: usize = 64;
/// A drainer waits for the end of a burst of frees, so that runs grow long, but not when this part
/// of what the pool holds waits to be given back.
const MUCH: usize = 4;

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
        let own = lock(&self.shards[shard].runs).take(&self.arenas, pages);
        let taken = match own.or_else(|| self.take_elsewhere(shard, pages)) {
            Some(Taken { page, warm: true }) => return Ok(page),
            Some(Taken { page, warm: false }) => page,
            None => self.start_arena(shard, pages)?,
        };
        if let Err(error) = self.source.commit(self.run(taken, pages)) {
            let (arena, run) = self.run_of(taken);
            let mut runs = [0; _];
            set(&mut runs, run);
            lock(&self.shards[arena.owner()].runs).put_cold(arena, &runs);
            return Err(error.into());
        }
        self.resident_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(taken)
    }

    fn take_elsewhere(&self, shard: usize, pages: usize) -> Option<Taken> {
        (0..self.shards.len())
            .filter(|&other| other != shard)
            .find_map(|other| {
                let mut runs = try_lock(&self.shards[other].runs)?;
                runs.take(&self.arenas, pages)
            })
    }

    /// Puts an arena to use for runs of `pages` pages, and takes the first.
    fn start_arena(&self, shard: usize, pages: usize) -> Result<PageNumber, AllocError> {
        let arena = self.arenas.add(pages, shard)?;
        let mut runs = [0; _];
        (1..arena.runs()).for_each(|run| set(&mut runs, run));
        lock(&self.shards[shard].runs).put_cold(arena, &runs);
        Ok(arena.page_of(0))
    }

    fn run_of(&self, page: PageNumber) -> (&Arena, usize) {
        let arena = self.arenas.arena_of(page).expect("runs lie in arenas");
        (arena, arena.run_at(page).expect("a run starts here"))
    }

    /// Takes over zspages that no bin has any more.
    pub(crate) fn release(&self, released: Released) {
        let mut list = released.0;
        let mut touched = [false; MAX_SHARDS];
        let mut held: Option<(usize, MutexGuard<'_, RunLists>)> = None;
        while let Some(page) = self.arenas.pop(&mut list) {
            let (arena, run) = self.run_of(page);
            let owner = arena.owner();
            if held.as_ref().is_none_or(|(shard, _)| *shard != owner) {
                // Never two at a time.
                drop(held.take());
                held = Some((owner, lock(&self.shards[owner].runs)));
            }
            if let Some((_, runs)) = &mut held {
                runs.put_warm(arena, run);
                touched[owner] = runs.warm_pages > self.retained_now();
            }
        }
        drop(held);
        for (shard, _) in self.shards.iter().zip(touched).filter(|(_, full)| *full) {
            let waiting = lock(&shard.runs).warm_pages;
            let may_wait = waiting * PAGE_SIZE <= self.deferred_share;
            if !(may_wait && self.drain_signal.leave_memory()) {
                self.discard_warm(shard);
            }
        }
    }

    /// Pages of freed runs that still have their memory.
    pub(crate) fn warm_pages(&self) -> usize {
        let warm = self.shards.iter().map(|shard| lock(&shard.runs).warm_pages);
        warm.sum()
    }

    /// Whether a large part of the pool's memory is that of freed runs.
    pub(crate) fn much_is_warm(&self) -> bool {
        self.warm_pages() > self.resident_pages.load(Ordering::Relaxed) / MUCH
    }

    /// How many warm pages a shard may hold back just now.
    fn retained_now(&self) -> usize {
        let part = self.resident_pages.load(Ordering::Relaxed) / RETAINED_PART;
        self.retained_pages.min(part.max(MIN_RETAINED_PAGES))
    }

    /// Gives the memory of all pages that hold no object back: empty zspages that were held back
    /// for reuse. Returns how many pages that were.
    pub fn trim(&self) -> usize {
        self.trim_classes(0..self.classes().len())
    }

    /// Like [`Pool::trim`], but looks for empty zspages in some classes only.
    pub(crate) fn trim_classes(&self, classes: Range<usize>) -> usize {
        let mut released = Released::new();
        for (shard_index, shard) in self.shards.iter().enumerate() {
            for class_index in classes.clone() {
                let context = self.context(shard_index, class_index);
                let emptied = lock(&shard.bins[class_index].state).trim(&context);
                if let Some(page) = emptied {
                    released.push(&self.arenas, page);
                }
            }
        }
        let before = self.resident_pages.load(Ordering::Relaxed);
        self.release(released);
        let discarded = self.discard_all_warm();
        let after = self.resident_pages.load(Ordering::Relaxed);
        discarded.max(before.saturating_sub(after))
    }

    /// Gives the memory of all freed runs back; returns how many pages that were.
    pub(crate) fn discard_all_warm(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| self.discard_warm(shard))
            .sum()
    }

    /// Gives the memory of a shard's freed runs back; returns how many pages that were.
    fn discard_warm(&self, shard: &Shard) -> usize {
        let mut discarded = 0;
        loop {
            let mut taken = [None; DISCARD_ARENAS];
            {
                let mut runs = lock(&shard.runs);
                taken.fill_with(|| runs.take_warm_arena(&self.arenas));
            }
            if taken[0].is_none() {
                return discarded;
            }
            let result = self.discard_runs(taken.iter().flatten());
            let mut runs = lock(&shard.runs);
            let mut pages = 0;
            for (arena, bits) in taken.iter().flatten() {
                if result.is_ok() {
                    runs.put_cold(arena, bits);
                    pages += count(bits) * arena.run_pages();
                } else {
                    // They still have their memory: keep them for reuse, to be tried again later.
                    each(bits).for_each(|run| runs.put_warm(arena, run));
                }
            }
            drop(runs);
            self.resident_pages.fetch_sub(pages, Ordering::Relaxed);
            discarded += pages;
            if result.is_err() {
                self.discard_failures.fetch_add(1, Ordering::Relaxed);
                return discarded;
            }
        }
    }

    /// Hands runs to the source, with neighbours merged.
    fn discard_runs<'a>(
        &self,
        taken: impl Iterator<Item = &'a (&'a Arena, RunBits)>,
    ) -> Result<(), SourceError> {
        let mut merged = [PageRun {
            start: self.base,
            pages: 0,
        }; DISCARD_RUNS];
        let mut merged_count = 0;
        for (arena, runs) in taken {
            let mut end = None;
            for run in each(runs) {
                let page = arena.page_of(run);
                if end == Some(page.0) {
                    merged[merged_count - 1].pages += arena.run_pages();
                } else {
                    if merged_count == DISCARD_RUNS {
                        self.discard_merged(&merged)?;
                        merged_count = 0;
                    }
                    merged[merged_count] = self.run(page, arena.run_pages());
                    merged_count += 1;
                }
                end = Some(page.0 + arena.run_pages() as u32);
            }
        }
        self.discard_merged(&merged[..merged_count])
    }

    fn discard_merged(&self, merged: &[PageRun]) -> Result<(), SourceError> {
        // SAFETY: the runs lie in the pool's reservation and were taken out of all sets, so no
        // zspage is in them and only this thread knows them.
        unsafe { self.source.discard(merged) }
    }
}

fn set(runs: &mut RunBits, run: usize) {
    runs[run / 64] |= 1 << (run % 64);
}
