//! Loom models of all pairs of changes of a slot.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p memfold-swap --lib --release`
//!
//! Data is modelled by loom cells: a location is the index of a cell. Loom reports accesses that
//! are not ordered with its freeing or refilling.

use loom::{cell::UnsafeCell, model, sync::Arc, thread};

use crate::{
    backlog::Backlog,
    block_record::{BlockRecord, FreedPage},
    counts::{OverflowCounts, Released},
    entry::{EntryCell, Location, MAX_INLINE_COUNT, Position, TierKind},
    grace::Grace,
    slot::{Slot, SlotRanges},
    sync::{Mutex, atomic::AtomicUsize, lock},
};

const SLOT: Slot = Slot::from_raw(513);

/// A slot, its storage, and the space's records.
struct World {
    cell: EntryCell,
    overflow: OverflowCounts,
    grace: Grace,
    storage: [UnsafeCell<u64>; 2],
}

// SAFETY: loom checks that accesses to the storage are ordered, and everything else is `Sync`.
unsafe impl Sync for World {}
// SAFETY: it holds no state of a thread.
unsafe impl Send for World {}

fn at(location: u64) -> Position {
    Position {
        tier: TierKind::Compressed,
        location: Location::from_raw(location),
    }
}

const PAGE: u64 = 42;
const NOTHING: u64 = 0;

impl World {
    fn new() -> Self {
        Self {
            cell: EntryCell::new(),
            overflow: OverflowCounts::new(),
            grace: Grace::new(1),
            storage: [UnsafeCell::new(NOTHING), UnsafeCell::new(NOTHING)],
        }
    }

    fn write(&self, location: u64, value: u64) {
        // SAFETY: loom panics if this is not ordered with every other access.
        self.storage[location as usize].with_mut(|data| unsafe { *data = value });
    }

    fn read(&self, position: Position) -> u64 {
        // SAFETY: loom panics if this is not ordered with every write.
        self.storage[position.location.into_raw() as usize].with(|data| unsafe { *data })
    }

    /// A world whose slot holds the page, with `count` owners.
    fn stored(count: u64) -> Arc<Self> {
        let world = Self::new();
        world.store();
        for _ in 1..count {
            world.cell.duplicate(SLOT, &world.overflow).unwrap();
        }
        Arc::new(world)
    }

    fn store(&self) {
        assert!(self.cell.reserve());
        self.write(0, PAGE);
        self.cell.publish(SLOT, at(0));
    }

    fn load(&self) {
        let _reading = self.grace.enter(0);
        let entry = self.cell.load();
        let position = entry.position().expect("the caller holds a count");
        assert_eq!(self.read(position), PAGE);
        self.cell.mark_used(entry);
    }

    fn duplicate(&self) {
        self.cell.duplicate(SLOT, &self.overflow).unwrap();
    }

    /// Releases a count and frees the data with the last. Returns whether it was the last.
    fn release(&self) -> bool {
        match self.cell.release(SLOT, &self.overflow) {
            Released::Counted => false,
            Released::Last(position) => {
                self.write(position.location.into_raw(), NOTHING);
                true
            }
        }
    }

    fn release_one(&self) {
        self.release();
    }

    fn migrate_away(&self) {
        self.migrate();
    }

    /// Moves the page from storage 0 to 1 as a migration does, if it is still there.
    fn migrate(&self) -> bool {
        let Some(from) = self.cell.try_hold(SLOT, &self.overflow) else {
            return false;
        };
        if from == at(0) {
            {
                let _reading = self.grace.enter(0);
                assert_eq!(self.read(from), PAGE);
            }
            self.write(1, PAGE);
            if self.cell.relocate(from, at(1)) {
                self.grace.wait();
                self.write(0, NOTHING);
            } else {
                self.write(1, NOTHING);
            }
        }
        self.release()
    }

    fn count(&self) -> u64 {
        self.overflow.get(SLOT).unwrap_or(self.cell.inline_count())
    }

    fn assert_gone(&self) {
        assert_eq!(self.count(), 0);
        assert!(self.cell.load().position().is_none());
        for location in 0..2 {
            assert_eq!(
                self.read(at(location)),
                NOTHING,
                "storage {location} leaked"
            );
        }
        // The slot can be used again.
        self.store();
        self.load();
    }
}

fn pair(world: &Arc<World>, one: fn(&World), other: fn(&World)) {
    let first = Arc::clone(world);
    let thread = thread::spawn(move || one(&first));
    other(world);
    thread.join().unwrap();
}

#[test]
fn what_is_published_is_what_was_written() {
    model(|| {
        let world = Arc::new(World::new());
        let writer = Arc::clone(&world);
        let thread = thread::spawn(move || writer.store());
        // A walker, which holds no count, sees no page or the whole one.
        if world.cell.try_hold(SLOT, &world.overflow).is_some() {
            world.load();
            world.release();
        }
        thread.join().unwrap();
        assert_eq!(world.count(), 1);
        assert!(world.release());
        world.assert_gone();
    });
}

#[test]
fn a_cancelled_store_was_never_there() {
    model(|| {
        let world = Arc::new(World::new());
        pair(
            &world,
            |w| {
                assert!(w.cell.reserve());
                w.cell.cancel(SLOT);
            },
            |w| assert_eq!(w.cell.try_hold(SLOT, &w.overflow), None),
        );
        world.assert_gone();
    });
}

#[test]
fn two_last_releases_free_once() {
    model(|| {
        let world = World::stored(2);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.release());
        let here = world.release();
        assert!(here ^ thread.join().unwrap());
        world.assert_gone();
    });
}

#[test]
fn load_beside_release() {
    model(|| {
        let world = World::stored(2);
        pair(&world, World::release_one, |w| {
            w.load();
            w.release();
        });
        world.assert_gone();
    });
}

#[test]
fn load_beside_duplicate() {
    model(|| {
        let world = World::stored(2);
        pair(&world, World::duplicate, World::load);
        assert_eq!(world.count(), 3);
    });
}

#[test]
fn duplicate_beside_duplicate_into_overflow() {
    model(|| {
        let world = World::stored(MAX_INLINE_COUNT - 1);
        pair(&world, World::duplicate, World::duplicate);
        assert_eq!(world.count(), MAX_INLINE_COUNT + 1);
        assert!(!world.release());
        assert_eq!(world.count(), MAX_INLINE_COUNT);
    });
}

#[test]
fn duplicate_beside_release_at_the_border() {
    // Not from 1, where the page itself would go.
    for start in MAX_INLINE_COUNT..=MAX_INLINE_COUNT + 2 {
        model(move || {
            let world = World::stored(start);
            pair(&world, World::duplicate, World::release_one);
            assert_eq!(world.count(), start);
        });
    }
}

#[test]
fn hold_beside_release_at_the_border() {
    for start in MAX_INLINE_COUNT..=MAX_INLINE_COUNT + 1 {
        model(move || {
            let world = World::stored(start);
            let hold = |w: &World| assert!(w.cell.try_hold(SLOT, &w.overflow).is_some());
            pair(&world, hold, World::release_one);
            assert_eq!(world.count(), start);
        });
    }
}

#[test]
fn release_beside_release_out_of_overflow() {
    model(|| {
        let world = World::stored(MAX_INLINE_COUNT + 2);
        pair(&world, World::release_one, World::release_one);
        assert_eq!(world.count(), MAX_INLINE_COUNT);
    });
}

#[test]
fn load_beside_migration() {
    model(|| {
        let world = World::stored(1);
        pair(&world, World::migrate_away, World::load);
        world.load();
        assert!(world.release());
        world.assert_gone();
    });
}

#[test]
fn release_beside_migration() {
    model(|| {
        let world = World::stored(1);
        pair(&world, World::migrate_away, World::release_one);
        world.assert_gone();
    });
}

#[test]
fn duplicate_beside_migration() {
    model(|| {
        let world = World::stored(1);
        pair(&world, World::migrate_away, World::duplicate);
        assert_eq!(world.count(), 2);
        world.load();
    });
}

/// A compactor holds no count: it changes an entry only if it still names the old object.
#[test]
fn release_beside_relocation_without_a_count() {
    model(|| {
        let world = World::stored(1);
        let other = Arc::clone(&world);
        let thread = thread::spawn(move || other.cell.relocate(at(0), at(1)));
        let released = world.cell.release(SLOT, &world.overflow);
        let moved = thread.join().unwrap();
        assert_eq!(released, Released::Last(at(moved.into())));
        assert!(!world.cell.relocate(at(0), at(1)));
    });
}

#[test]
fn marks_lose_no_count() {
    model(|| {
        let world = World::stored(1);
        pair(
            &world,
            |w| {
                w.cell.grow_older();
                w.cell.grow_older();
            },
            |w| {
                w.load();
                w.duplicate();
            },
        );
        assert_eq!(world.count(), 2);
        assert_eq!(world.cell.load().position(), Some(at(0)));
    });
}

#[test]
fn load_beside_ageing() {
    model(|| {
        let world = World::stored(1);
        world.cell.grow_older();
        pair(&world, World::load, |w| {
            w.cell.grow_older();
        });
        assert_eq!(
            (world.count(), world.cell.load().position()),
            (1, Some(at(0)))
        );
        world.load();
        assert_eq!(world.cell.load().age(), 0);
    });
}

#[test]
fn release_beside_ageing() {
    model(|| {
        let world = World::stored(1);
        pair(&world, World::release_one, |w| {
            w.cell.grow_older();
        });
        world.assert_gone();
    });
}

#[test]
fn migration_beside_ageing() {
    model(|| {
        let world = World::stored(1);
        pair(&world, World::migrate_away, |w| {
            w.cell.grow_older();
        });
        assert_eq!(world.cell.load().position(), Some(at(1)));
        assert_eq!((world.count(), world.cell.load().age()), (1, 1));
    });
}

/// A block of two pages, whose head lies in storage 1.
fn block() -> Arc<(World, BlockRecord)> {
    let world = World::new();
    world.write(1, PAGE);
    let record = BlockRecord::new();
    record.open(1, 2, 100);
    Arc::new((world, record))
}

/// Reads the page at a place and frees it, and with the last the head. Returns its storage.
fn read_and_free((world, record): &(World, BlockRecord), place: usize) -> Option<u64> {
    assert_eq!(world.read(at(record.word())), PAGE);
    match record.free(place) {
        FreedPage::OthersLive => None,
        FreedPage::Last(word) => {
            world.write(word, NOTHING);
            Some(word)
        }
    }
}

#[test]
fn the_last_page_of_a_block_frees_it_once() {
    model(|| {
        let block = block();
        let other = Arc::clone(&block);
        let thread = thread::spawn(move || read_and_free(&other, 1));
        let here = read_and_free(&block, 0);
        let there = thread.join().unwrap();
        assert_eq!(here.or(there), Some(1));
        assert!(here.is_none() || there.is_none());
        // The record can be used again.
        block.1.open(0, 1, 1);
        assert_eq!(block.1.free(0), FreedPage::Last(0));
    });
}

/// A compactor copies a head and replaces its word; the old one stays readable until it is done.
#[test]
fn a_block_is_freed_where_compaction_has_put_it() {
    model(|| {
        let block = block();
        let other = Arc::clone(&block);
        let thread = thread::spawn(move || {
            let (world, record) = &*other;
            world.write(0, PAGE);
            record.relocate(1, 0)
        });
        assert_eq!(block.1.free(0), FreedPage::OthersLive);
        let FreedPage::Last(word) = block.1.free(1) else {
            panic!("a block outlived its pages");
        };
        let moved = thread.join().unwrap();
        assert_eq!(word, u64::from(!moved));
        assert!(!block.1.relocate(word, 1 - word));
    });
}

/// A gather whose workers exit at once, so that they race with new work.
struct Gathering {
    backlog: Mutex<Backlog>,
    /// Releases of each slot.
    released: [AtomicUsize; 3],
}

impl Gathering {
    fn release_some(&self) -> bool {
        let (ranges, count) = lock(&self.backlog).take(1);
        for range in ranges {
            let slot = range.start().into_raw() as usize;
            self.released[slot].fetch_add(1, loom::sync::atomic::Ordering::Relaxed);
        }
        lock(&self.backlog).finish(count);
        count > 0
    }

    fn work(&self) {
        loop {
            while self.release_some() {}
            if lock(&self.backlog).worker_leaves() {
                return;
            }
        }
    }

    /// Queues a range as `Gather::hand_over` does; returns the worker it started.
    fn bring(this: &Arc<Self>, first: u32, count: u32) -> Option<thread::JoinHandle<()>> {
        let mut backlog = lock(&this.backlog);
        let worker = (backlog.workers() == 0).then(|| {
            backlog.worker_came();
            let worker = Arc::clone(this);
            thread::spawn(move || worker.work())
        });
        let slots = (first..first + count).map(Slot::from_raw);
        backlog.add(&slots.collect::<SlotRanges>());
        worker
    }
}

#[test]
fn what_is_handed_over_is_released_once() {
    model(|| {
        let gathering = Arc::new(Gathering {
            backlog: Mutex::new(Backlog::default()),
            released: [const { 0 }; 3].map(AtomicUsize::new),
        });
        let first = Gathering::bring(&gathering, 0, 2);
        // While the worker may be leaving.
        let second = Gathering::bring(&gathering, 2, 1);
        // A thread that needs memory helps.
        gathering.release_some();
        for worker in [first, second].into_iter().flatten() {
            worker.join().unwrap();
        }
        let backlog = lock(&gathering.backlog);
        assert_eq!((backlog.slots(), backlog.workers()), (0, 0));
        for count in &gathering.released {
            assert_eq!(count.load(loom::sync::atomic::Ordering::Relaxed), 1);
        }
    });
}
