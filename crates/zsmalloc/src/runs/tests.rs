//! The run lists of a shard, against a model and against themselves.

use super::*;
use memfold_testing::Random;

/// Adds an arena for runs of `pages` pages to an extent while a discard is attempted. Returns the
/// arena, whose first run is taken, and what the discard found.
fn make_arena<'a>(
    runs: &mut RunLists,
    arenas: &'a Arenas,
    pages: usize,
) -> (&'a Arena, Option<Batch>) {
    let (index, units) = runs.begin_arena(arenas, pages).unwrap();
    let found = runs.take_giving(arenas);
    let start = units.start;
    let arena = arenas.add(index, units, pages, 0).unwrap();
    runs.end_arena(arenas, (index, start), Some(arena));
    assert!(matches!(
        runs.take(arenas, pages, false),
        Some(Taken::Cold(_))
    ));
    (arena, found)
}

#[test]
fn memory_skipped_while_an_arena_is_made_is_discarded_later() {
    let arenas = Arenas::new(1, 64, 16).unwrap();
    let mut runs = RunLists::new();
    let index = arenas.add_extent().unwrap();
    runs.open(&arenas, index, 0);
    let (arena, _) = make_arena(&mut runs, &arenas, 1);
    runs.put_freed(&arenas, arena, 0);
    let (_, found) = make_arena(&mut runs, &arenas, 2);
    assert!(found.is_none(), "a busy extent is left alone");
    let found = runs.take_giving(&arenas).expect("it has a warm page");
    assert_eq!((found.extent, found.pages.count()), (index, 1));
}

/// Interleaved steps of several threads between holds of the lock, with what each of them holds.
struct Model {
    arenas: Arenas,
    runs: RunLists,
    random: Random,
    used: Vec<PageNumber>,
    cold: Vec<Cold>,
    batches: Vec<Batch>,
    making: Vec<(usize, Range<usize>, usize)>,
}

impl Model {
    fn take(&mut self) {
        let pages = 1 + self.random.below(16);
        let fill = self.random.below(2) == 0;
        match self.runs.take(&self.arenas, pages, fill) {
            Some(Taken::Warm(page)) => self.used.push(page),
            Some(Taken::Cold(cold)) => self.cold.push(cold),
            None => {
                let place = self.runs.begin_arena(&self.arenas, pages).or_else(|| {
                    let index = self.arenas.add_extent().ok()?;
                    self.runs.open(&self.arenas, index, 0);
                    self.runs.begin_arena(&self.arenas, pages)
                });
                if let Some((index, units)) = place {
                    self.making.push((index, units, pages));
                }
            }
        }
    }

    fn end_making(&mut self) {
        if let Some((index, units, pages)) = self.making.pop() {
            let start = units.start;
            let made = (self.random.below(4) > 0)
                .then(|| self.arenas.add(index, units, pages, 0).unwrap());
            self.runs.end_arena(&self.arenas, (index, start), made);
        }
    }

    fn end_cold(&mut self) {
        if self.cold.is_empty() {
            return;
        }
        let mut cold = self.cold.swap_remove(self.random.below(self.cold.len()));
        if let Some((_, blocks)) = cold.filling(&self.arenas) {
            let filled = blocks.map(|block| block.filter(|_| self.random.below(3) > 0));
            self.runs.end_fill(&self.arenas, &mut cold, &filled);
        }
        if !cold.lacking.is_empty() && self.random.below(8) == 0 {
            let arena = self.arenas.arena_of(cold.page).unwrap();
            let run = arena.run_at(cold.page).unwrap();
            self.runs.put_refused(&self.arenas, arena, run, &cold);
        } else {
            self.used.push(cold.page);
        }
    }

    fn free(&mut self) {
        if !self.used.is_empty() {
            let page = self.used.swap_remove(self.random.below(self.used.len()));
            let arena = self.arenas.arena_of(page).unwrap();
            let run = arena.run_at(page).unwrap();
            self.runs.put_freed(&self.arenas, arena, run);
        }
    }

    fn give_back(&mut self) {
        let batch = if self.random.below(2) == 0 {
            self.runs.take_giving(&self.arenas)
        } else {
            let index = self.random.below(self.arenas.extents_used().max(1));
            let least = 1 + self.random.below(16);
            (index < self.arenas.extents_used())
                .then(|| self.runs.take_spare(&self.arenas, index, least))
                .flatten()
        };
        self.batches.extend(batch);
    }

    fn end_batch(&mut self) {
        if let Some(batch) = self.batches.pop() {
            let discarded = self.random.below(4) > 0;
            self.runs.end_batch(&self.arenas, &batch, discarded);
        }
    }

    /// Counters match the sets, and each run is where it belongs.
    fn check(&self) {
        let mut sum = Free::default();
        for index in 0..self.arenas.extents_used() {
            let extent = self.arenas.extent(index);
            for block in self.arenas.blocks() {
                let free = extent.free(&block);
                sum = Free {
                    giving: sum.giving + free.giving,
                    spare: sum.spare + free.spare,
                };
            }
            for arena in self.arenas.arenas_in(index) {
                for run in 0..arena.runs() {
                    let pages = arena.pages_of(run);
                    let used = extent.used.meets(&pages);
                    let taken = self.used.contains(&arena.page_of(run));
                    let cold = self.cold.iter().any(|cold| cold.page == arena.page_of(run));
                    assert_eq!(used, taken || cold);
                    let sets = [&arena.warm, &arena.cold].map(|set| set.contains(run));
                    // A free run in neither set is held by a fill or a discard.
                    assert!(sets != [true, true] && !(used && sets.contains(&true)));
                    assert!(!sets[0] || extent.resident.contains(&pages));
                    assert!(!sets[1] || !extent.resident.contains(&pages));
                    assert!(!taken || extent.resident.contains(&pages));
                    let held = extent.is_busy();
                    assert!(used || held || sets.contains(&true), "a run is lost");
                }
            }
        }
        // These pages are being filled or discarded: unused and not resident otherwise.
        for cold in self.cold.iter().filter(|cold| cold.fills) {
            let extent = self.arenas.extent(cold.extent);
            for (block, part) in self.arenas.blocks_of(&cold.lacking) {
                let used = |unit| extent.used.unit(unit).count_ones() as usize;
                assert_eq!(block.clone().map(used).sum::<usize>(), part.len());
                assert!(extent.is_cold(&block));
            }
        }
        for batch in &self.batches {
            let extent = self.arenas.extent(batch.extent);
            for unit in self.arenas.blocks().flatten() {
                let others = extent.used.unit(unit) | extent.resident.unit(unit);
                assert_eq!(batch.pages.unit(unit) & others, 0);
            }
        }
        assert_eq!(sum.giving, self.runs.warm_pages());
        assert_eq!(sum.spare, self.arenas.spare_pages());
    }
}

#[test]
fn no_run_is_lost_and_every_page_is_counted() {
    for (block_pages, seed) in [(16, 1), (16, 2), (32, 3), (64, 4), (128, 5)] {
        let mut model = Model {
            arenas: Arenas::new(24, 128, block_pages).unwrap(),
            runs: RunLists::new(),
            random: Random::new(seed),
            used: Vec::new(),
            cold: Vec::new(),
            batches: Vec::new(),
            making: Vec::new(),
        };
        for step in 0..20_000 {
            match model.random.below(16) {
                0..5 => model.take(),
                5..7 => model.end_making(),
                7..10 => model.end_cold(),
                // Alternately more takes and more frees.
                10..12 => model.free(),
                12..14 if step / 500 % 2 == 0 => model.free(),
                14 => model.give_back(),
                _ => model.end_batch(),
            }
            if step % 7 == 0 {
                model.check();
            }
        }
        while !(model.cold.is_empty() && model.making.is_empty() && model.batches.is_empty()) {
            model.end_cold();
            model.end_making();
            model.end_batch();
        }
        while !model.used.is_empty() {
            model.free();
        }
        model.check();
        while let Some(batch) = model.runs.take_giving(&model.arenas) {
            model.runs.end_batch(&model.arenas, &batch, true);
        }
        model.check();
        assert_eq!(
            (model.runs.warm_pages(), model.arenas.spare_pages()),
            (0, 0)
        );
    }
}
