//! Compaction: moving objects out of sparse zspages, concurrently with everything else.
//!
//! Objects are immutable, so moving one needs no reader to stop:
//!
//! 1. Sparse zspages are *isolated*: no object is stored in them any more. Stores enter the epoch
//!    as readers do, so after a grace period no slot in them is half written.
//! 2. Each object is copied to another zspage, and its owner is asked to replace its word. The
//!    owner refuses if the object was freed meanwhile. The old slot stays as it is.
//! 3. After another grace period no reader that loaded an old word is left: old slots are freed and
//!    empty zspages released.

use crate::{
    class::SizeClass, error::MisuseError, geometry::PageNumber, pool::Pool, released::Released,
    relocate::Relocate, source::PageSource, sync::try_lock, word::ObjectWord, zspage::BITMAP_WORDS,
};

/// What a compaction did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// Objects whose owner replaced their word.
    pub objects_moved: usize,
    /// Objects whose owner refused.
    pub objects_refused: usize,
    /// Pages of the zspages that were emptied and released.
    pub pages_released: usize,
}

/// Zspages emptied between two grace periods. They are kept on the stack, as memory is short when a
/// pool is compacted.
const BATCH: usize = 64;

/// A zspage that is being emptied.
#[derive(Debug, Clone, Copy)]
struct Isolated {
    page: PageNumber,
    shard: usize,
    /// The slots whose objects have moved.
    moved: [u64; BITMAP_WORDS],
}

/// Isolated zspages of one class. Dropping the batch returns them to their bins.
struct Batch<'a, S: PageSource> {
    pool: &'a Pool<S>,
    class_index: usize,
    zspages: [Isolated; BATCH],
    count: usize,
    report: &'a mut CompactReport,
}

impl<S: PageSource> Pool<S> {
    /// Moves objects out of sparse zspages into fuller ones and releases those that become empty.
    /// Stores, reads and frees continue. `owner` is asked to replace the word of each moved object.
    /// `go_on` is called before each batch of zspages (a few hundred objects); `false` ends the
    /// compaction.
    ///
    /// Returns the memory to the kernel before the call returns, along with what was retained for
    /// reuse; see [`Config::retained_pages`](crate::Config::retained_pages). Free parts of huge
    /// pages stay: see [`Pool::trim_spare`].
    ///
    /// Deferred frees are done first, unless another thread is doing them.
    ///
    /// A class that another thread is compacting is skipped.
    ///
    /// The caller must not hold a [`ReadGuard`](crate::ReadGuard), nor call this from inside a read
    /// or a [`store_with`](Pool::store_with): compaction waits for those.
    pub fn compact(
        &self,
        owner: &(impl Relocate + ?Sized),
        mut go_on: impl FnMut() -> bool,
    ) -> CompactReport {
        let mut report = CompactReport::default();
        for (class_index, compactor) in self.compactors.iter().enumerate() {
            // Objects whose free is deferred are not worth moving, and their zspages may empty by
            // themselves.
            self.drain_under_pressure();
            let Some(_compactor) = try_lock(compactor) else {
                continue;
            };
            let mut surplus = self.surplus_zspages(class_index);
            let anything = surplus > 0;
            while surplus > 0 && go_on() {
                let before = report;
                let mut batch = Batch::isolate(self, class_index, surplus, &mut report);
                let isolated = batch.count;
                batch.empty(owner);
                drop(batch);
                if isolated == 0 || report.pages_released == before.pages_released {
                    // The owner refuses, or other threads interfere: give up for now.
                    break;
                }
                surplus = self.surplus_zspages(class_index);
            }
            if anything {
                // Zspages that other threads emptied during the isolation are released here.
                self.trim_classes(class_index..class_index + 1);
            }
        }
        report
    }

    /// Zspages of a class beyond those its objects need when packed.
    fn surplus_zspages(&self, class_index: usize) -> usize {
        let (mut zspages, mut used) = (0, 0);
        for shard in &self.shards {
            let bin = shard.bins[class_index].state.lock();
            zspages += bin.zspages();
            used += bin.used();
        }
        let needed = used.div_ceil(self.classes()[class_index].objects());
        zspages.saturating_sub(needed)
    }

    /// Takes a free slot of a zspage that is in service.
    fn allocate_in_service(&self, first: usize, class_index: usize) -> Option<ObjectWord> {
        (0..self.shards.len()).find_map(|offset| {
            let shard = (first + offset) % self.shards.len();
            let bin = &self.shards[shard].bins[class_index].state;
            bin.lock().allocate(&self.context(shard, class_index))
        })
    }
}

impl<'a, S: PageSource> Batch<'a, S> {
    /// Isolates the sparsest zspages of a class, at most `surplus`, so that the others have room
    /// for their objects.
    fn isolate(
        pool: &'a Pool<S>,
        class_index: usize,
        surplus: usize,
        report: &'a mut CompactReport,
    ) -> Self {
        let none = Isolated {
            page: PageNumber(0),
            shard: 0,
            moved: [0; BITMAP_WORDS],
        };
        let mut batch = Self {
            pool,
            class_index,
            zspages: [none; BATCH],
            count: 0,
            report,
        };
        let wanted = surplus.min(BATCH);
        let share = wanted.div_ceil(pool.shards.len());
        for (shard, parts) in pool.shards.iter().enumerate() {
            let mut bin = parts.bins[class_index].state.lock();
            bin.list_current(&pool.context(shard, class_index));
            for _ in 0..share.min(wanted - batch.count) {
                let Some(page) = bin.isolate(&pool.arenas) else {
                    break;
                };
                batch.zspages[batch.count] = Isolated {
                    page,
                    shard,
                    ..none
                };
                batch.count += 1;
            }
        }
        batch
    }

    /// Moves the objects, as far as the owner agrees and there is room.
    fn empty(&mut self, owner: &(impl Relocate + ?Sized)) {
        if self.count == 0 {
            return;
        }
        // Stores that began before the isolation are finished after this.
        self.pool.epoch.wait_for_readers();
        let class = self.pool.classes()[self.class_index];
        for position in 0..self.count {
            for index in 0..class.objects() {
                let Isolated { page, .. } = self.zspages[position];
                if self.pool.arenas.zspage(page).is_stored(index)
                    && !self.move_object(owner, &class, position, index)
                {
                    return;
                }
            }
        }
    }

    /// Moves one object; `false` if there is no room for any more.
    fn move_object(
        &mut self,
        owner: &(impl Relocate + ?Sized),
        class: &SizeClass,
        position: usize,
        index: usize,
    ) -> bool {
        let source = &mut self.zspages[position];
        let Some(new) = self
            .pool
            .allocate_in_service(source.shard, self.class_index)
        else {
            return false;
        };
        let old = ObjectWord::new(self.class_index, source.page, index);
        let (from, to) = (self.pool.slot(old, class), self.pool.slot(new, class));
        // SAFETY: the old slot is in an isolated zspage and stores into it have finished, so
        // nothing writes it, even if its object is freed now. The new slot was allocated by this
        // thread and its word not published. The two slots differ.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), class.size()) };
        // SAFETY: as above: the old slot is not written before the zspage is returned to its bin.
        let object = unsafe { std::slice::from_raw_parts(from.as_ptr(), class.size()) };
        if owner.relocate(old, new, object) {
            source.moved[index / 64] |= 1 << (index % 64);
            self.report.objects_moved += 1;
        } else {
            let _: Result<(), MisuseError> = self.pool.try_free(new);
            self.report.objects_refused += 1;
        }
        true
    }
}

impl<S: PageSource> Drop for Batch<'_, S> {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        // Readers that loaded an old word are gone after this.
        self.pool.epoch.wait_for_readers();
        let mut released = Released::new();
        for source in &self.zspages[..self.count] {
            let context = self.pool.context(source.shard, self.class_index);
            let zspage = self.pool.arenas.zspage(source.page);
            let bin = &self.pool.shards[source.shard].bins[self.class_index].state;
            let mut bin = bin.lock();
            let moved = (0..context.class.objects())
                .filter(|index| source.moved[index / 64] & (1 << (index % 64)) != 0);
            let freed = moved.filter(|&index| zspage.free_slot(index)).count();
            if let Some(page) = bin.end_isolation(&context, source.page, freed) {
                released.push(&self.pool.arenas, page);
                self.report.pages_released += context.class.pages();
            }
        }
        if !released.is_empty() {
            self.pool.release(released);
        }
    }
}
