//! The free runs of a shard, and the state of its stretches.

use crate::{
    arena::{Arena, Arenas, NOT_LISTED, PageBits},
    class::MAX_CHAIN_PAGES,
    stretch::{self, Stretch},
    sync::atomic::{AtomicU32, Ordering},
    zspage::{NO_LINK, PageNumber},
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

/// A cold run, or a stretch without memory and without a zspage whose cold runs were all taken.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cold {
    Run(PageNumber),
    Stretch(usize),
}

/// Memory that somebody took out of the sets to give it back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) stretch: usize,
    pub(crate) pages: PageBits,
    was_huge: bool,
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
    /// Pages that can be given back at once: warm runs, and huge stretches not in use.
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

    /// Changes a stretch and what is counted of it.
    fn change(&mut self, arenas: &Arenas, stretch: &Stretch, change: impl FnOnce()) {
        let shares = || match stretch.keeps_spare() {
            true => (0, stretch.warm()),
            false => (stretch.warm(), 0),
        };
        let (warm, spare) = shares();
        change();
        let (warm_now, spare_now) = shares();
        self.warm_pages = self.warm_pages + warm_now - warm;
        arenas.spare_changed(spare, spare_now);
    }

    /// Takes a run that has memory.
    pub(crate) fn take_warm(&mut self, arenas: &Arenas, pages: usize) -> Option<PageNumber> {
        while let Some(arena) = self.warm.first(arenas, pages) {
            if let Some(run) = arena.warm.pop() {
                let stretch = arenas.stretch(arena.stretch());
                self.change(arenas, stretch, || {
                    stretch.set_warm(stretch.warm() - pages);
                    stretch.set_used(stretch.used() + pages);
                });
                return Some(arena.page_of(run));
            }
            self.warm.drop_first(arena);
        }
        None
    }

    /// Takes a run that has no memory; or, if `whole` and there is one that lies in a stretch with
    /// nothing in it, all of that stretch, which is busy then.
    pub(crate) fn take_cold(&mut self, arenas: &Arenas, pages: usize, whole: bool) -> Option<Cold> {
        while let Some(arena) = self.cold.first(arenas, pages) {
            let index = arena.stretch();
            let stretch = arenas.stretch(index);
            let empty = stretch.used() == 0 && stretch.warm() == 0;
            if whole && empty && !arena.cold.is_empty() && !stretch.is_busy() {
                stretch.set_busy(true);
                arenas.arenas_in(index).for_each(|arena| arena.cold.clear());
                return Some(Cold::Stretch(index));
            }
            if let Some(run) = arena.cold.pop() {
                self.change(arenas, stretch, || stretch.set_used(stretch.used() + pages));
                return Some(Cold::Run(arena.page_of(run)));
            }
            self.cold.drop_first(arena);
        }
        None
    }

    /// Takes a freed run, which has memory.
    pub(crate) fn put_warm(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let stretch = arenas.stretch(arena.stretch());
        arena.warm.insert(run);
        self.warm.list(arena);
        self.change(arenas, stretch, || {
            stretch.set_used(stretch.used() - arena.run_pages());
            stretch.set_warm(stretch.warm() + arena.run_pages());
        });
        if !stretch.keeps_spare() {
            self.list_giving(arenas, arena.stretch());
        }
    }

    /// Takes a run back that was taken cold and got no memory.
    pub(crate) fn put_cold(&mut self, arenas: &Arenas, arena: &Arena, run: usize) {
        let stretch = arenas.stretch(arena.stretch());
        stretch.set_used(stretch.used() - arena.run_pages());
        arena.cold.insert(run);
        self.cold.list(arena);
    }

    /// Ends what [`RunLists::take_cold`] began with a whole stretch: it was filled by a huge page,
    /// or not.
    pub(crate) fn put_stretch(&mut self, arenas: &Arenas, index: usize, huge: bool) {
        let stretch = arenas.stretch(index);
        if huge {
            self.change(arenas, stretch, || {
                stretch.set_huge(true);
                stretch.set_warm(arenas.stretch_pages());
            });
            // If the run it was filled for is never taken.
            self.list_giving(arenas, index);
        }
        for arena in arenas.arenas_in(index) {
            self.put_runs(arena, 0..arena.runs(), huge);
        }
        stretch.set_busy(false);
    }

    fn put_runs(&mut self, arena: &Arena, runs: impl Iterator<Item = usize>, warm: bool) {
        let (set, lists) = match warm {
            true => (&arena.warm, &mut self.warm),
            false => (&arena.cold, &mut self.cold),
        };
        runs.for_each(|run| set.insert(run));
        if !set.is_empty() {
            lists.list(arena);
        }
    }

    /// Assigns units of a stretch with room to an arena that is to be made, and takes its first
    /// run. The stretch is busy until [`RunLists::end_arena`].
    pub(crate) fn begin_arena(
        &mut self,
        arenas: &Arenas,
        pages: usize,
    ) -> Option<(usize, std::ops::Range<usize>)> {
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
                self.change(arenas, stretch, || {
                    stretch.set_used(stretch.used() + pages);
                    if stretch.is_huge() {
                        stretch.set_warm(stretch.warm() - pages);
                    }
                });
                return Some((index, start..end));
            } else {
                first = false;
            }
            link = next;
        }
        None
    }

    /// Ends what [`RunLists::begin_arena`] began, which assigned the units from `start` on, with
    /// the arena, or with none. Returns whether the first run, which is the caller's, has memory.
    pub(crate) fn end_arena(
        &mut self,
        arenas: &Arenas,
        (index, start): (usize, usize),
        pages: usize,
        made: Option<&Arena>,
    ) -> bool {
        let stretch = arenas.stretch(index);
        let huge = stretch.is_huge();
        match made {
            Some(arena) => self.put_runs(arena, 1..arena.runs(), huge),
            None => {
                self.change(arenas, stretch, || {
                    stretch.set_used(stretch.used() - pages);
                    if huge {
                        stretch.set_warm(stretch.warm() + pages);
                    }
                });
                // Nobody else assigned any of a busy one meanwhile.
                stretch.set_assigned(start);
                self.list_open(arenas, index);
            }
        }
        self.end_busy(arenas, index);
        huge
    }

    /// Takes a stretch that was put to use for this shard, and is backed by a huge page or not.
    pub(crate) fn open(&mut self, arenas: &Arenas, index: usize, shard: usize, huge: bool) {
        let stretch = arenas.stretch(index);
        stretch.set_owner(shard);
        self.list_open(arenas, index);
        self.put_stretch(arenas, index, huge);
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
            if !stretch.is_busy() && !stretch.keeps_spare() && stretch.warm() > 0 {
                return Some(self.take_batch(arenas, index));
            }
        }
        None
    }

    /// Takes the free memory of a huge stretch of which part is in use, if that is at least `least`
    /// pages.
    pub(crate) fn take_spare(
        &mut self,
        arenas: &Arenas,
        index: usize,
        least: usize,
    ) -> Option<Batch> {
        let stretch = arenas.stretch(index);
        let takes = !stretch.is_busy() && stretch.keeps_spare() && stretch.warm() >= least;
        takes.then(|| self.take_batch(arenas, index))
    }

    fn take_batch(&mut self, arenas: &Arenas, index: usize) -> Batch {
        let stretch = arenas.stretch(index);
        let was_huge = stretch.is_huge();
        let first = arenas.first_page(index).0;
        // All free pages of a huge one have memory, those of no run included.
        let mut pages: PageBits = [0; _];
        if was_huge {
            (0..arenas.stretch_pages()).for_each(|page| pages[page / 64] |= 1 << (page % 64));
        }
        for arena in arenas.arenas_in(index) {
            for run in 0..arena.runs() {
                if arena.warm.contains(run) != was_huge {
                    let start = (arena.page_of(run).0 - first) as usize;
                    (start..start + arena.run_pages())
                        .for_each(|page| pages[page / 64] ^= 1 << (page % 64));
                }
            }
            arena.warm.clear();
        }
        stretch.set_busy(true);
        self.change(arenas, stretch, || {
            stretch.set_warm(0);
            stretch.set_huge(false);
        });
        Batch {
            stretch: index,
            pages,
            was_huge,
        }
    }

    /// Takes back what [`RunLists::take_giving`] or [`RunLists::take_spare`] gave: addresses now,
    /// or, if it could not be given back, memory as before. What was freed meanwhile stays warm.
    pub(crate) fn end_batch(&mut self, arenas: &Arenas, batch: &Batch, discarded: bool) {
        let stretch = arenas.stretch(batch.stretch);
        let first = arenas.first_page(batch.stretch).0;
        for arena in arenas.arenas_in(batch.stretch) {
            let taken = |&run: &usize| {
                let page = (arena.page_of(run).0 - first) as usize;
                batch.pages[page / 64] & 1 << (page % 64) != 0
            };
            self.put_runs(arena, (0..arena.runs()).filter(taken), !discarded);
        }
        if !discarded {
            self.change(arenas, stretch, || {
                stretch.set_huge(batch.was_huge);
                stretch.set_warm(stretch.warm() + count(&batch.pages));
            });
        }
        self.end_busy(arenas, batch.stretch);
    }

    /// Ends the time in which what a stretch has to give was passed over.
    fn end_busy(&mut self, arenas: &Arenas, index: usize) {
        let stretch = arenas.stretch(index);
        stretch.set_busy(false);
        if stretch.warm() > 0 && !stretch.keeps_spare() {
            self.list_giving(arenas, index);
        }
    }
}

/// How many pages are in a set.
pub(crate) fn count(pages: &PageBits) -> usize {
    pages.iter().map(|bits| bits.count_ones() as usize).sum()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Puts an arena for runs of so many pages into a stretch. Somebody looks for memory to give
    /// back meanwhile. Returns the arena, whose first run is taken, and what was found.
    fn make_arena<'a>(
        runs: &mut RunLists,
        arenas: &'a Arenas,
        pages: usize,
    ) -> (&'a Arena, Option<Batch>) {
        let (index, units) = runs.begin_arena(arenas, pages).unwrap();
        let found = runs.take_giving(arenas);
        let start = units.start;
        let arena = arenas.add(index, units, pages, 0).unwrap();
        runs.end_arena(arenas, (index, start), pages, Some(arena));
        (arena, found)
    }

    #[test]
    fn memory_passed_over_while_an_arena_is_made_is_given_back_later() {
        let arenas = Arenas::new(1, 64).unwrap();
        let mut runs = RunLists::new();
        let index = arenas.add_stretch().unwrap();
        runs.open(&arenas, index, 0, false);
        let (arena, _) = make_arena(&mut runs, &arenas, 1);
        runs.put_warm(&arenas, arena, 0);
        let (_, found) = make_arena(&mut runs, &arenas, 2);
        assert!(found.is_none(), "a busy stretch is left alone");
        let found = runs.take_giving(&arenas).expect("it has a warm page");
        assert_eq!((found.stretch, count(&found.pages)), (index, 1));
    }
}
