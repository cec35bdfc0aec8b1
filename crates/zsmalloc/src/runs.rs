//! The free runs of a shard, and the state of its extents.

use std::ops::Range;

use crate::{
    arena::{Arena, Arenas, NOT_LISTED},
    extent::{self, Extent, Free},
    geometry::{MAX_CHAIN_PAGES, PageNumber, UNIT_PAGES},
    pages::{PageSet, UnitBits},
    sync::atomic::{AtomicU32, Ordering},
    zspage::NO_LINK,
};

/// Arenas with free runs of one kind, by run length, linked through the arenas. An arena may stay
/// listed when it has no such runs any more.
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

    fn drop_first(&mut self, arena: &Arena) {
        let next = (self.next)(arena);
        self.heads[arena.run_pages()] = next.load(Ordering::Relaxed);
        next.store(NOT_LISTED, Ordering::Relaxed);
    }
}

/// A run that was free.
#[derive(Debug)]
pub(crate) enum Taken {
    Warm(PageNumber),
    Cold(Cold),
}

/// A run that is not resident, at least in part.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) page: PageNumber,
    extent: usize,
    /// The run's pages, counted from the first of the extent.
    pages: Range<usize>,
    /// The pages of it that are not resident and will be committed.
    pub(crate) lacking: Range<usize>,
    /// Whether their blocks are to be populated with huge pages first. The extent is busy until
    /// [`RunLists::end_fill`].
    fills: bool,
}

impl Cold {
    /// The blocks to populate with huge pages, if any: the extent, and the units of each.
    pub(crate) fn filling(&self, arenas: &Arenas) -> Option<(usize, [Option<Range<usize>>; 2])> {
        self.fills.then(|| {
            let mut blocks = arenas.blocks_of(&self.lacking).map(|(block, _)| block);
            (self.extent, [blocks.next(), blocks.next()])
        })
    }
}

/// Free memory of an extent, removed from the sets to be discarded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) extent: usize,
    pub(crate) pages: PageSet,
    /// The blocks of it that were huge, as bits of their first units.
    huge: u32,
    /// Those of them that are partly in use and have to be split.
    split: u32,
}

impl Batch {
    /// One discarded page of each huge page that has to be split first, counted from the start of
    /// the extent.
    pub(crate) fn splits(&self) -> impl Iterator<Item = usize> + '_ {
        let split = |unit: &usize| self.split & 1 << unit != 0;
        (0..u32::BITS as usize).filter(split).filter_map(|first| {
            let unit = (first..u32::BITS as usize).find(|&unit| self.pages.unit(unit) != 0)?;
            Some(unit * UNIT_PAGES + self.pages.unit(unit).trailing_zeros() as usize)
        })
    }
}

/// The free runs of a shard.
#[derive(Debug)]
pub(crate) struct RunLists {
    warm: ArenaLists,
    cold: ArenaLists,
    /// Extents that may have memory to discard.
    giving: u32,
    /// Extents that may have room for arenas.
    open: u32,
    /// Pages that can be discarded without splitting: see [`Free::giving`].
    warm_pages: usize,
}

impl RunLists {
    pub(crate) fn new() -> Self {
        Self {
            warm: ArenaLists::new(|arena| &arena.next_warm),
            cold: ArenaLists::new(|arena| &arena.next_cold),
            giving: extent::END,
            open: extent::END,
            warm_pages: 0,
        }
    }

    pub(crate) fn warm_pages(&self) -> usize {
        self.warm_pages
    }

    /// Accounts for a change of free pages.
    fn count(&mut self, arenas: &Arenas, before: Free, after: Free) {
        self.warm_pages = self.warm_pages + after.giving - before.giving;
        arenas.spare_changed(before.spare, after.spare);
    }

    /// Marks the pages of a run as used, or as free.
    fn set_used(&mut self, arenas: &Arenas, extent: &Extent, run: &Range<usize>, used: bool) {
        for (block, part) in arenas.blocks_of(run) {
            extent.used.remove(&part);
            // The free pages if the run is free, and if it is used.
            let (free, taken) = if !extent.resident.contains(&part) {
                (Free::default(), Free::default())
            } else if !extent.is_huge(&block) {
                (Free::giving(part.len()), Free::default())
            } else if extent.is_used(&block) {
                (Free::spare(part.len()), Free::default())
            } else {
                let whole = arenas.block_pages();
                (Free::giving(whole), Free::spare(whole - part.len()))
            };
            if used {
                extent.used.insert(&part);
                self.count(arenas, free, taken);
            } else {
                self.count(arenas, taken, free);
            }
        }
    }

    /// Inserts a free run into the set it belongs to.
    fn put(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let extent = arenas.extent(arena.extent());
        let pages = arena.pages_of(run);
        if extent.resident.contains(&pages) {
            arena.warm.insert(run);
            self.warm.list(arena);
        } else {
            arena.cold.insert(run);
            self.cold.list(arena);
        }
    }

    /// Takes a resident run.
    pub(crate) fn take_warm(&mut self, arenas: &Arenas, pages: usize) -> Option<PageNumber> {
        while let Some(arena) = self.warm.first(arenas, pages) {
            if let Some(run) = arena.warm.pop() {
                let pages = arena.pages_of(run);
                self.set_used(arenas, arenas.extent(arena.extent()), &pages, true);
                return Some(arena.page_of(run));
            }
            self.warm.drop_first(arena);
        }
        None
    }

    /// Takes a run, preferably a resident one; see [`RunLists::take_cold`].
    pub(crate) fn take(&mut self, arenas: &Arenas, pages: usize, fill: bool) -> Option<Taken> {
        let warm = self.take_warm(arenas, pages).map(Taken::Warm);
        warm.or_else(|| self.take_cold(arenas, pages, fill).map(Taken::Cold))
    }

    /// Takes a run that is not fully resident; with `fill`, its blocks are to be populated with
    /// huge pages if they can be.
    pub(crate) fn take_cold(&mut self, arenas: &Arenas, pages: usize, fill: bool) -> Option<Cold> {
        while let Some(arena) = self.cold.first(arenas, pages) {
            let Some(run) = arena.cold.pop() else {
                self.cold.drop_first(arena);
                continue;
            };
            let extent = arenas.extent(arena.extent());
            let pages = arena.pages_of(run);
            let mut cold = Cold {
                page: arena.page_of(run),
                extent: arena.extent(),
                lacking: lacking(extent, &pages),
                pages,
                fills: false,
            };
            let can_fill = |(block, _)| extent.is_cold(&block);
            if fill && !extent.is_busy() && arenas.blocks_of(&cold.lacking).all(can_fill) {
                extent.set_busy(true);
                cold.fills = true;
                for (block, _) in arenas.blocks_of(&cold.lacking) {
                    let runs = runs_in(arenas, cold.extent, &block);
                    runs.for_each(|(arena, run)| arena.cold.remove(run));
                }
            }
            self.set_used(arenas, extent, &cold.pages, true);
            if !cold.fills {
                extent.resident.insert(&cold.lacking);
            }
            return Some(cold);
        }
        None
    }

    /// Completes [`RunLists::take_cold`] of a run with blocks to fill, of which these were
    /// `filled`. The pages that are still lacking must be committed.
    pub(crate) fn end_fill(
        &mut self,
        arenas: &Arenas,
        cold: &mut Cold,
        filled: &[Option<Range<usize>>],
    ) {
        let extent = arenas.extent(cold.extent);
        let blocks = arenas.blocks_of(&cold.lacking);
        for block in filled.iter().flatten() {
            let before = extent.free(block);
            extent.set_huge(block, true);
            for unit in block.clone() {
                extent.resident.set_unit(unit, UnitBits::MAX);
            }
            self.count(arenas, before, extent.free(block));
        }
        cold.lacking = lacking(extent, &cold.pages);
        extent.resident.insert(&cold.lacking);
        for (block, _) in blocks {
            // Free runs of the block are in no set: the taker of this one removed them.
            for (arena, run) in runs_in(arenas, cold.extent, &block) {
                if !extent.used.meets(&arena.pages_of(run)) {
                    self.put(arenas, arena, run);
                }
            }
        }
        cold.fills = false;
        self.end_busy(arenas, cold.extent);
    }

    /// Inserts a run that was freed.
    pub(crate) fn put_freed(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let extent = arenas.extent(arena.extent());
        let pages = arena.pages_of(run);
        self.set_used(arenas, extent, &pages, false);
        self.put(arenas, arena, run);
        if arenas
            .blocks_of(&pages)
            .any(|(block, _)| !extent.keeps_spare(&block))
        {
            self.list_giving(arenas, arena.extent());
        }
    }

    /// Inserts a run whose commit was refused.
    pub(crate) fn put_refused(&mut self, arenas: &Arenas, arena: &Arena, run: usize, cold: &Cold) {
        let extent = arenas.extent(cold.extent);
        extent.resident.remove(&cold.lacking);
        self.put_freed(arenas, arena, run);
    }

    /// Assigns units of an extent with room to an arena that will be made. The extent is busy until
    /// [`RunLists::end_arena`].
    pub(crate) fn begin_arena(
        &mut self,
        arenas: &Arenas,
        pages: usize,
    ) -> Option<(usize, Range<usize>)> {
        // Full extents are removed from the list, busy ones skipped.
        let mut link = self.open;
        let mut first = true;
        while link != extent::END {
            let index = link as usize - 1;
            let extent = arenas.extent(index);
            let next = extent.next_open.load(Ordering::Relaxed);
            if !arenas.has_room(extent) && first {
                extent
                    .next_open
                    .store(extent::NOT_LISTED, Ordering::Relaxed);
                self.open = next;
            } else if arenas.has_room(extent) && !extent.is_busy() {
                let start = extent.assigned();
                let end = start + arenas.units_for(extent, pages);
                extent.set_assigned(end);
                extent.set_busy(true);
                return Some((index, start..end));
            } else {
                first = false;
            }
            link = next;
        }
        None
    }

    /// Completes [`RunLists::begin_arena`], which assigned the units from `start` on, with the
    /// arena, or with none if it could not be made.
    pub(crate) fn end_arena(
        &mut self,
        arenas: &Arenas,
        (index, start): (usize, usize),
        made: Option<&Arena>,
    ) {
        match made {
            Some(arena) => (0..arena.runs()).for_each(|run| self.put(arenas, arena, run)),
            None => {
                // Units of a busy extent are assigned by no other thread.
                arenas.extent(index).set_assigned(start);
                self.list_open(arenas, index);
            }
        }
        self.end_busy(arenas, index);
    }

    /// Adds an extent to this shard.
    pub(crate) fn open(&mut self, arenas: &Arenas, index: usize, shard: usize) {
        arenas.extent(index).set_owner(shard);
        self.list_open(arenas, index);
    }

    fn list_open(&mut self, arenas: &Arenas, index: usize) {
        let next = &arenas.extent(index).next_open;
        if next.load(Ordering::Relaxed) == extent::NOT_LISTED {
            next.store(self.open, Ordering::Relaxed);
            self.open = index as u32 + 1;
        }
    }

    fn list_giving(&mut self, arenas: &Arenas, index: usize) {
        let next = &arenas.extent(index).next_warm;
        if next.load(Ordering::Relaxed) == extent::NOT_LISTED {
            next.store(self.giving, Ordering::Relaxed);
            self.giving = index as u32 + 1;
        }
    }

    /// Takes all memory of an extent that can be discarded without splitting a huge page.
    pub(crate) fn take_giving(&mut self, arenas: &Arenas) -> Option<Batch> {
        while self.giving != extent::END {
            let index = self.giving as usize - 1;
            let extent = arenas.extent(index);
            self.giving = extent.next_warm.load(Ordering::Relaxed);
            extent
                .next_warm
                .store(extent::NOT_LISTED, Ordering::Relaxed);
            // A busy extent is listed again when it is no longer busy.
            if let Some(batch) = self.take_giving_in(arenas, index) {
                return Some(batch);
            }
        }
        None
    }

    /// The same for one extent, which stays listed if it is.
    pub(crate) fn take_giving_in(&mut self, arenas: &Arenas, index: usize) -> Option<Batch> {
        let extent = arenas.extent(index);
        let giving = |block: &Range<usize>| extent.free(block).giving > 0;
        self.take_batch(arenas, index, giving)
    }

    /// Takes the free memory of those partly used huge pages of an extent that have at least
    /// `least` free pages.
    pub(crate) fn take_spare(
        &mut self,
        arenas: &Arenas,
        index: usize,
        least: usize,
    ) -> Option<Batch> {
        let extent = arenas.extent(index);
        let spare = |block: &Range<usize>| extent.free(block).spare >= least;
        self.take_batch(arenas, index, spare)
    }

    /// Takes the free memory of the blocks that `of` selects; `None` if there is none, or the
    /// extent is busy.
    fn take_batch(
        &mut self,
        arenas: &Arenas,
        index: usize,
        of: impl Fn(&Range<usize>) -> bool,
    ) -> Option<Batch> {
        let extent = arenas.extent(index);
        if extent.is_busy() || !arenas.blocks().any(|block| of(&block)) {
            return None;
        }
        let mut batch = Batch {
            extent: index,
            pages: PageSet::EMPTY,
            huge: 0,
            split: 0,
        };
        extent.set_busy(true);
        for block in arenas.blocks().filter(of) {
            let before = extent.free(&block);
            batch.split |= u32::from(extent.keeps_spare(&block)) << block.start;
            batch.huge |= u32::from(extent.is_huge(&block)) << block.start;
            for unit in block.clone() {
                let free = extent.free_in(unit);
                batch.pages.insert_in(unit, free);
                extent
                    .resident
                    .set_unit(unit, extent.resident.unit(unit) & !free);
            }
            extent.set_huge(&block, false);
            self.count(arenas, before, Free::default());
        }
        // Not available until the outcome of the discard is known.
        for (arena, run) in runs_meeting(arenas, &batch) {
            arena.warm.remove(run);
            arena.cold.remove(run);
        }
        Some(batch)
    }

    /// Completes [`RunLists::take_giving`] or [`RunLists::take_spare`]: the batch is cold now or,
    /// if the discard failed, resident as before. What was freed meanwhile stays warm.
    pub(crate) fn end_batch(&mut self, arenas: &Arenas, batch: &Batch, discarded: bool) {
        let extent = arenas.extent(batch.extent);
        if !discarded {
            for block in arenas.blocks() {
                let before = extent.free(&block);
                for unit in block.clone() {
                    let back = extent.resident.unit(unit) | batch.pages.unit(unit);
                    extent.resident.set_unit(unit, back);
                }
                if batch.huge & 1 << block.start != 0 {
                    extent.set_huge(&block, true);
                }
                self.count(arenas, before, extent.free(&block));
            }
        }
        for (arena, run) in runs_meeting(arenas, batch) {
            self.put(arenas, arena, run);
        }
        self.end_busy(arenas, batch.extent);
    }

    /// Makes an extent available for discards again.
    fn end_busy(&mut self, arenas: &Arenas, index: usize) {
        let extent = arenas.extent(index);
        extent.set_busy(false);
        if arenas.blocks().any(|block| extent.free(&block).giving > 0) {
            self.list_giving(arenas, index);
        }
    }
}

/// The pages of a run that are not resident: all, or those in one of its two blocks.
fn lacking(extent: &Extent, run: &Range<usize>) -> Range<usize> {
    let has = |page: usize| extent.resident.contains(&(page..page + 1));
    let start = run.clone().find(|&page| !has(page)).unwrap_or(run.end);
    let end = (start..run.end).find(|&page| has(page)).unwrap_or(run.end);
    debug_assert!(
        (end..run.end).all(has),
        "a block has memory for a run or has not"
    );
    start..end
}

/// The runs some of whose pages are in a batch.
fn runs_meeting<'a>(
    arenas: &'a Arenas,
    batch: &'a Batch,
) -> impl Iterator<Item = (&'a Arena, usize)> + use<'a> {
    arenas
        .arenas_in(batch.extent)
        .flat_map(|arena| (0..arena.runs()).map(move |run| (arena, run)))
        .filter(|(arena, run)| batch.pages.meets(&arena.pages_of(*run)))
}

/// The runs that lie in a block of an extent, at least partly.
fn runs_in<'a>(
    arenas: &'a Arenas,
    extent: usize,
    block: &Range<usize>,
) -> impl Iterator<Item = (&'a Arena, usize)> + use<'a> {
    let block = block.start * UNIT_PAGES..block.end * UNIT_PAGES;
    arenas
        .arenas_in(extent)
        .flat_map(move |arena| arena.runs_at(&block).map(move |run| (arena, run)))
}

#[cfg(all(test, not(loom)))]
mod tests;
