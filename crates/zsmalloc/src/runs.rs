//! The free runs of a shard, and the state of its stretches.

use std::ops::Range;

use crate::{
    arena::{Arena, Arenas, NOT_LISTED},
    geometry::{MAX_CHAIN_PAGES, PageNumber, UNIT_PAGES},
    pages::{PageSet, UnitBits},
    stretch::{self, Free, Stretch},
    sync::atomic::{AtomicU32, Ordering},
    zspage::NO_LINK,
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

/// One of which a part, or all, has no memory.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) page: PageNumber,
    stretch: usize,
    /// The run's pages, counted from the first of the stretch.
    pages: Range<usize>,
    /// Those of them that have no memory, and are to get it.
    pub(crate) lacking: Range<usize>,
    /// Whether the blocks they lie in are to be filled by huge pages first, if that can be. The
    /// stretch is busy until [`RunLists::end_fill`].
    fills: bool,
}

impl Cold {
    /// The blocks to be filled by huge pages, if any: the stretch, and the units of each.
    pub(crate) fn filling(&self, arenas: &Arenas) -> Option<(usize, [Option<Range<usize>>; 2])> {
        self.fills.then(|| {
            let mut blocks = arenas.blocks_of(&self.lacking).map(|(block, _)| block);
            (self.stretch, [blocks.next(), blocks.next()])
        })
    }
}

/// Memory that somebody took out of the sets to give it back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) stretch: usize,
    pub(crate) pages: PageSet,
    /// The blocks of it that were huge, each by its first unit.
    huge: u32,
    /// Those of them of which a part was in use, so that they are to be split.
    split: u32,
}

impl Batch {
    /// A page that is given back of each huge page that has to be split first, counted from the
    /// first of the stretch.
    pub(crate) fn splits(&self) -> impl Iterator<Item = usize> + '_ {
        let split = |unit: &usize| self.split & 1 << unit != 0;
        (0..u32::BITS as usize).filter(split).filter_map(|first| {
            let unit = (first..).find(|&unit| self.pages.unit(unit) != 0)?;
            Some(unit * UNIT_PAGES + self.pages.unit(unit).trailing_zeros() as usize)
        })
    }
}

/// The free runs of a shard.
#[derive(Debug)]
pub(crate) struct RunLists {
    warm: ArenaLists,
    cold: ArenaLists,
    /// Stretches that may have memory to give back.
    giving: u32,
    /// Stretches that may have room for arenas.
    open: u32,
    /// Pages that can be given back at once: see [`Free::giving`].
    warm_pages: usize,
}

impl RunLists {
    pub(crate) fn new() -> Self {
        Self {
            warm: ArenaLists::new(|arena| &arena.next_warm),
            cold: ArenaLists::new(|arena| &arena.next_cold),
            giving: stretch::END,
            open: stretch::END,
            warm_pages: 0,
        }
    }

    pub(crate) fn warm_pages(&self) -> usize {
        self.warm_pages
    }

    /// Counts what became of free pages.
    fn count(&mut self, arenas: &Arenas, before: Free, after: Free) {
        self.warm_pages = self.warm_pages + after.giving - before.giving;
        arenas.spare_changed(before.spare, after.spare);
    }

    /// Marks the pages of a run as used, or as free.
    fn set_used(&mut self, arenas: &Arenas, stretch: &Stretch, run: &Range<usize>, used: bool) {
        for (block, part) in arenas.blocks_of(run) {
            stretch.used.remove(&part);
            // What is free if the run is, and if it is used.
            let (free, taken) = if !stretch.resident.contains(&part) {
                (Free::default(), Free::default())
            } else if !stretch.is_huge(&block) {
                (Free::giving(part.len()), Free::default())
            } else if stretch.is_used(&block) {
                (Free::spare(part.len()), Free::default())
            } else {
                let whole = arenas.block_pages();
                (Free::giving(whole), Free::spare(whole - part.len()))
            };
            if used {
                stretch.used.insert(&part);
                self.count(arenas, free, taken);
            } else {
                self.count(arenas, taken, free);
            }
        }
    }

    /// Puts a free run into the set that it belongs to.
    fn put(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let stretch = arenas.stretch(arena.stretch());
        let pages = arena.pages_of(run);
        if stretch.resident.contains(&pages) {
            arena.warm.insert(run);
            self.warm.list(arena);
        } else {
            arena.cold.insert(run);
            self.cold.list(arena);
        }
    }

    /// Takes a run all of which has memory.
    pub(crate) fn take_warm(&mut self, arenas: &Arenas, pages: usize) -> Option<PageNumber> {
        while let Some(arena) = self.warm.first(arenas, pages) {
            if let Some(run) = arena.warm.pop() {
                let pages = arena.pages_of(run);
                self.set_used(arenas, arenas.stretch(arena.stretch()), &pages, true);
                return Some(arena.page_of(run));
            }
            self.warm.drop_first(arena);
        }
        None
    }

    /// Takes a run, best one that has memory; see [`RunLists::take_cold`].
    pub(crate) fn take(&mut self, arenas: &Arenas, pages: usize, fill: bool) -> Option<Taken> {
        let warm = self.take_warm(arenas, pages).map(Taken::Warm);
        warm.or_else(|| self.take_cold(arenas, pages, fill).map(Taken::Cold))
    }

    /// Takes a run of which some page has no memory; with `fill` as one whose blocks are to be
    /// filled by huge pages, if they can be.
    pub(crate) fn take_cold(&mut self, arenas: &Arenas, pages: usize, fill: bool) -> Option<Cold> {
        while let Some(arena) = self.cold.first(arenas, pages) {
            let Some(run) = arena.cold.pop() else {
                self.cold.drop_first(arena);
                continue;
            };
            let stretch = arenas.stretch(arena.stretch());
            let pages = arena.pages_of(run);
            let mut cold = Cold {
                page: arena.page_of(run),
                stretch: arena.stretch(),
                lacking: lacking(stretch, &pages),
                pages,
                fills: false,
            };
            let can_fill = |(block, _)| stretch.is_cold(&block);
            if fill && !stretch.is_busy() && arenas.blocks_of(&cold.lacking).all(can_fill) {
                stretch.set_busy(true);
                cold.fills = true;
                for (block, _) in arenas.blocks_of(&cold.lacking) {
                    let runs = runs_in(arenas, cold.stretch, &block);
                    runs.for_each(|(arena, run)| arena.cold.remove(run));
                }
            }
            self.set_used(arenas, stretch, &cold.pages, true);
            if !cold.fills {
                stretch.resident.insert(&cold.lacking);
            }
            return Some(cold);
        }
        None
    }

    /// Ends what [`RunLists::take_cold`] began with blocks to fill, of which these were `filled`.
    /// What the run still lacks is to be committed.
    pub(crate) fn end_fill(
        &mut self,
        arenas: &Arenas,
        cold: &mut Cold,
        filled: &[Option<Range<usize>>],
    ) {
        let stretch = arenas.stretch(cold.stretch);
        let blocks = arenas.blocks_of(&cold.lacking);
        for block in filled.iter().flatten() {
            let before = stretch.free(block);
            stretch.set_huge(block, true);
            for unit in block.clone() {
                stretch.resident.set_unit(unit, UnitBits::MAX);
            }
            self.count(arenas, before, stretch.free(block));
        }
        cold.lacking = lacking(stretch, &cold.pages);
        stretch.resident.insert(&cold.lacking);
        for (block, _) in blocks {
            // None that is free is in a set: this one's taker took them out.
            for (arena, run) in runs_in(arenas, cold.stretch, &block) {
                if !stretch.used.meets(&arena.pages_of(run)) {
                    self.put(arenas, arena, run);
                }
            }
        }
        cold.fills = false;
        self.end_busy(arenas, cold.stretch);
    }

    /// Takes a run that is free again.
    pub(crate) fn put_freed(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let stretch = arenas.stretch(arena.stretch());
        let pages = arena.pages_of(run);
        self.set_used(arenas, stretch, &pages, false);
        self.put(arenas, arena, run);
        if arenas
            .blocks_of(&pages)
            .any(|(block, _)| !stretch.keeps_spare(&block))
        {
            self.list_giving(arenas, arena.stretch());
        }
    }

    /// Takes a run back that did not get the memory it lacked.
    pub(crate) fn put_refused(&mut self, arenas: &Arenas, arena: &Arena, run: usize, cold: &Cold) {
        let stretch = arenas.stretch(cold.stretch);
        stretch.resident.remove(&cold.lacking);
        self.put_freed(arenas, arena, run);
    }

    /// Assigns units of a stretch with room to an arena that is to be made. The stretch is busy
    /// until [`RunLists::end_arena`].
    pub(crate) fn begin_arena(
        &mut self,
        arenas: &Arenas,
        pages: usize,
    ) -> Option<(usize, Range<usize>)> {
        // Those that are full leave the list; a busy one is passed over.
        let mut link = self.open;
        let mut first = true;
        while link != stretch::END {
            let index = link as usize - 1;
            let stretch = arenas.stretch(index);
            let next = stretch.next_open.load(Ordering::Relaxed);
            if !arenas.has_room(stretch) && first {
                stretch
                    .next_open
                    .store(stretch::NOT_LISTED, Ordering::Relaxed);
                self.open = next;
            } else if arenas.has_room(stretch) && !stretch.is_busy() {
                let start = stretch.assigned();
                let end = start + arenas.units_for(stretch, pages);
                stretch.set_assigned(end);
                stretch.set_busy(true);
                return Some((index, start..end));
            } else {
                first = false;
            }
            link = next;
        }
        None
    }

    /// Ends what [`RunLists::begin_arena`] began, which assigned the units from `start` on, with
    /// the arena, or with none.
    pub(crate) fn end_arena(
        &mut self,
        arenas: &Arenas,
        (index, start): (usize, usize),
        made: Option<&Arena>,
    ) {
        match made {
            Some(arena) => (0..arena.runs()).for_each(|run| self.put(arenas, arena, run)),
            None => {
                // Nobody else assigned any of a busy one meanwhile.
                arenas.stretch(index).set_assigned(start);
                self.list_open(arenas, index);
            }
        }
        self.end_busy(arenas, index);
    }

    /// Takes a stretch that was put to use for this shard.
    pub(crate) fn open(&mut self, arenas: &Arenas, index: usize, shard: usize) {
        arenas.stretch(index).set_owner(shard);
        self.list_open(arenas, index);
    }

    fn list_open(&mut self, arenas: &Arenas, index: usize) {
        let next = &arenas.stretch(index).next_open;
        if next.load(Ordering::Relaxed) == stretch::NOT_LISTED {
            next.store(self.open, Ordering::Relaxed);
            self.open = index as u32 + 1;
        }
    }

    fn list_giving(&mut self, arenas: &Arenas, index: usize) {
        let next = &arenas.stretch(index).next_warm;
        if next.load(Ordering::Relaxed) == stretch::NOT_LISTED {
            next.store(self.giving, Ordering::Relaxed);
            self.giving = index as u32 + 1;
        }
    }

    /// Takes all memory of a stretch that can be given back without splitting a huge page.
    pub(crate) fn take_giving(&mut self, arenas: &Arenas) -> Option<Batch> {
        while self.giving != stretch::END {
            let index = self.giving as usize - 1;
            let stretch = arenas.stretch(index);
            self.giving = stretch.next_warm.load(Ordering::Relaxed);
            stretch
                .next_warm
                .store(stretch::NOT_LISTED, Ordering::Relaxed);
            // A busy one is listed again by whoever ends that.
            if let Some(batch) = self.take_giving_in(arenas, index) {
                return Some(batch);
            }
        }
        None
    }

    /// The same of one stretch. It stays listed, if it is.
    pub(crate) fn take_giving_in(&mut self, arenas: &Arenas, index: usize) -> Option<Batch> {
        let stretch = arenas.stretch(index);
        let giving = |block: &Range<usize>| stretch.free(block).giving > 0;
        self.take_batch(arenas, index, giving)
    }

    /// Takes the free memory of the huge pages of a stretch of which part is in use, where that is
    /// at least `least` pages.
    pub(crate) fn take_spare(
        &mut self,
        arenas: &Arenas,
        index: usize,
        least: usize,
    ) -> Option<Batch> {
        let stretch = arenas.stretch(index);
        let spare = |block: &Range<usize>| stretch.free(block).spare >= least;
        self.take_batch(arenas, index, spare)
    }

    /// Takes the free memory of some blocks of a stretch; none if there is no such block, or the
    /// stretch is busy.
    fn take_batch(
        &mut self,
        arenas: &Arenas,
        index: usize,
        of: impl Fn(&Range<usize>) -> bool,
    ) -> Option<Batch> {
        let stretch = arenas.stretch(index);
        if stretch.is_busy() || !arenas.blocks().any(|block| of(&block)) {
            return None;
        }
        let mut batch = Batch {
            stretch: index,
            pages: PageSet::EMPTY,
            huge: 0,
            split: 0,
        };
        stretch.set_busy(true);
        for block in arenas.blocks().filter(of) {
            let before = stretch.free(&block);
            batch.split |= u32::from(stretch.keeps_spare(&block)) << block.start;
            batch.huge |= u32::from(stretch.is_huge(&block)) << block.start;
            for unit in block.clone() {
                let free = stretch.free_in(unit);
                batch.pages.insert_in(unit, free);
                stretch
                    .resident
                    .set_unit(unit, stretch.resident.unit(unit) & !free);
            }
            stretch.set_huge(&block, false);
            self.count(arenas, before, Free::default());
        }
        // Nobody takes them before it is known whether they have memory, in part or at all.
        for (arena, run) in runs_meeting(arenas, &batch) {
            arena.warm.remove(run);
            arena.cold.remove(run);
        }
        Some(batch)
    }

    /// Takes back what [`RunLists::take_giving`] or [`RunLists::take_spare`] gave: addresses now,
    /// or, if it could not be given back, memory as before. What was freed meanwhile stays warm.
    pub(crate) fn end_batch(&mut self, arenas: &Arenas, batch: &Batch, discarded: bool) {
        let stretch = arenas.stretch(batch.stretch);
        if !discarded {
            for block in arenas.blocks() {
                let before = stretch.free(&block);
                for unit in block.clone() {
                    let back = stretch.resident.unit(unit) | batch.pages.unit(unit);
                    stretch.resident.set_unit(unit, back);
                }
                if batch.huge & 1 << block.start != 0 {
                    stretch.set_huge(&block, true);
                }
                self.count(arenas, before, stretch.free(&block));
            }
        }
        for (arena, run) in runs_meeting(arenas, batch) {
            self.put(arenas, arena, run);
        }
        self.end_busy(arenas, batch.stretch);
    }

    /// Ends the time in which what a stretch has to give was passed over.
    fn end_busy(&mut self, arenas: &Arenas, index: usize) {
        let stretch = arenas.stretch(index);
        stretch.set_busy(false);
        if arenas.blocks().any(|block| stretch.free(&block).giving > 0) {
            self.list_giving(arenas, index);
        }
    }
}

/// Which pages of a run have no memory: those in one of the two blocks that it may lie in, or all.
fn lacking(stretch: &Stretch, run: &Range<usize>) -> Range<usize> {
    let has = |page: usize| stretch.resident.contains(&(page..page + 1));
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
        .arenas_in(batch.stretch)
        .flat_map(|arena| (0..arena.runs()).map(move |run| (arena, run)))
        .filter(|(arena, run)| batch.pages.meets(&arena.pages_of(*run)))
}

/// The runs that lie in a block of a stretch, at least partly.
fn runs_in<'a>(
    arenas: &'a Arenas,
    stretch: usize,
    block: &Range<usize>,
) -> impl Iterator<Item = (&'a Arena, usize)> + use<'a> {
    let block = block.start * UNIT_PAGES..block.end * UNIT_PAGES;
    arenas
        .arenas_in(stretch)
        .flat_map(move |arena| arena.runs_at(&block).map(move |run| (arena, run)))
}

#[cfg(all(test, not(loom)))]
mod tests;
