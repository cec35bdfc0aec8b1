//! Statistics by class, as in the kernel's zsmalloc debugfs.

use std::fmt;

use crate::{geometry::PAGE_SIZE, pool::Pool, source::PageSource, sync::atomic::Ordering};

/// One size class of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of an object's slot.
    pub class_size: usize,
    /// Pages of a zspage.
    pub pages_per_zspage: usize,
    /// Slots of a zspage.
    pub objects_per_zspage: usize,
    /// Slots in all zspages.
    pub objects_allocated: usize,
    /// Slots that hold an object.
    pub objects_used: usize,
    /// Zspages.
    pub zspages: usize,
    /// Pages of those zspages.
    pub pages: usize,
    /// Bytes of those pages outside all slots.
    pub waste_bytes: usize,
}

impl ClassStats {
    /// Pages that packing the objects would free.
    pub fn pages_freeable(&self) -> usize {
        let needed = self.objects_used.div_ceil(self.objects_per_zspage);
        (self.zspages - needed.min(self.zspages)) * self.pages_per_zspage
    }
}

/// Statistics of a pool. Each class is a consistent snapshot; the whole is not if other threads use
/// the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// The classes, smallest first, the unused ones included.
    pub classes: Vec<ClassStats>,
    /// Resident pages: of zspages, of freed runs that were not discarded yet, and spare ones.
    pub resident_pages: usize,
    /// Resident pages in huge pages.
    pub huge_pages: usize,
    /// Resident pages in the free parts of huge pages in use.
    pub spare_pages: usize,
    /// Huge pages that were split.
    pub huge_splits: u64,
    /// Bytes of slots whose free was deferred and not yet begun. They count as used.
    pub deferred_bytes: usize,
    /// Batches of deferred frees with a word that named no stored object (a double free).
    pub deferred_misuse: u64,
    /// Discards that the page source failed.
    pub discard_failures: u64,
}

impl PoolStats {
    /// Slots that hold an object, in all classes.
    pub fn objects_used(&self) -> usize {
        self.classes.iter().map(|class| class.objects_used).sum()
    }

    /// Pages of zspages in all classes.
    pub fn pages(&self) -> usize {
        self.classes.iter().map(|class| class.pages).sum()
    }
}

impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>6} {:>12} {:>12} {:>10} {:>10} {:>14} {:>10}",
            "size", "allocated", "used", "zspages", "pages", "pages/zspage", "freeable"
        )?;
        for class in self.classes.iter().filter(|class| class.zspages > 0) {
            writeln!(
                f,
                "{:>6} {:>12} {:>12} {:>10} {:>10} {:>14} {:>10}",
                class.class_size,
                class.objects_allocated,
                class.objects_used,
                class.zspages,
                class.pages,
                class.pages_per_zspage,
                class.pages_freeable(),
            )?;
        }
        write!(
            f,
            "resident pages: {}, in huge ones: {}, spare: {}",
            self.resident_pages, self.huge_pages, self.spare_pages
        )
    }
}

impl<S: PageSource> Pool<S> {
    /// Statistics of every class. Locks each bin briefly.
    pub fn stats(&self) -> PoolStats {
        let class_stats = |(index, class): (usize, &crate::SizeClass)| {
            let (mut zspages, mut objects_used) = (0, 0);
            for shard in &self.shards {
                let bin = shard.bins[index].state.lock();
                zspages += bin.zspages();
                objects_used += bin.used();
            }
            let pages = zspages * class.pages();
            ClassStats {
                class_size: class.size(),
                pages_per_zspage: class.pages(),
                objects_per_zspage: class.objects(),
                objects_allocated: zspages * class.objects(),
                objects_used,
                zspages,
                pages,
                waste_bytes: pages * PAGE_SIZE - zspages * class.objects() * class.size(),
            }
        };
        PoolStats {
            classes: self.classes().iter().enumerate().map(class_stats).collect(),
            resident_pages: self.resident_pages.load(Ordering::Relaxed),
            huge_pages: self.huge_pages(),
            spare_pages: self.arenas.spare_pages(),
            huge_splits: self.huge_splits.load(Ordering::Relaxed),
            deferred_bytes: self.deferred_bytes(),
            deferred_misuse: self.deferred_misuse.load(Ordering::Relaxed),
            discard_failures: self.discard_failures.load(Ordering::Relaxed),
        }
    }
}
