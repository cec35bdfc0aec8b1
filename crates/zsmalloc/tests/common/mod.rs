//! Helpers for the tests.
#![allow(dead_code, reason = "each test binary uses some of them")]

use std::{
    collections::BTreeSet,
    ptr::NonNull,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
};

use memfold_testing::Random;
use zsmalloc::{HeapSource, PageRun, PageSource, SourceError};

/// A source that counts its committed pages and fails on demand.
#[derive(Default)]
pub(crate) struct TestSource {
    heap: HeapSource,
    pub committed_pages: AtomicI64,
    /// Commits that succeed before one fails; negative: all succeed.
    pub commits_left: AtomicI64Default,
    /// Discards that succeed before one fails; negative: all succeed.
    pub discards_left: AtomicI64Default,
    pub discard_calls: AtomicUsize,
    /// Pages of a huge page; none by default.
    pub huge_pages: usize,
    /// Requests for huge pages that are granted before none is; negative: all are.
    pub huge_left: AtomicI64Default,
    /// Which pages of the reservation lie in huge pages that were not split.
    huge: Mutex<BTreeSet<usize>>,
    pub splits: AtomicUsize,
    /// The next split meets others here as it begins, and again before it goes on.
    pub meet_at_split: Mutex<Option<Arc<Barrier>>>,
}

impl TestSource {
    /// A source that has huge pages of `pages` pages.
    pub(crate) fn with_huge_pages(pages: usize) -> Self {
        Self {
            huge_pages: pages,
            ..Self::default()
        }
    }

    fn huge(&self) -> std::sync::MutexGuard<'_, BTreeSet<usize>> {
        self.huge.lock().unwrap()
    }
}

fn first_page(run: &PageRun) -> usize {
    run.start.addr().get() / zsmalloc::PAGE_SIZE
}

/// A countdown that is off at first.
pub(crate) struct AtomicI64Default(pub AtomicI64);

impl Default for AtomicI64Default {
    fn default() -> Self {
        Self(AtomicI64::new(-1))
    }
}

impl AtomicI64Default {
    pub(crate) fn set(&self, left: i64) {
        self.0.store(left, Ordering::Relaxed);
    }

    /// Whether this call is the one that fails; it and all later ones do.
    fn fails(&self) -> bool {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                (left > 0).then_some(left - 1)
            })
            .is_err_and(|left| left == 0)
    }
}

// SAFETY: reservations are those of the inner source.
unsafe impl PageSource for TestSource {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        self.heap.reserve(pages)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.unreserve(base, pages) }
    }

    fn commit(&self, run: PageRun) -> Result<(), SourceError> {
        if self.commits_left.fails() {
            return Err(SourceError::Commit { pages: run.pages });
        }
        self.committed_pages
            .fetch_add(run.pages as i64, Ordering::Relaxed);
        Ok(())
    }

    fn huge_pages(&self) -> usize {
        self.huge_pages
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        assert_eq!(run.pages, self.huge_pages);
        if self.commits_left.0.load(Ordering::Relaxed) == 0 || self.huge_left.fails() {
            return false;
        }
        assert!(self.huge().insert(first_page(&run)), "it was huge already");
        self.committed_pages
            .fetch_add(run.pages as i64, Ordering::Relaxed);
        true
    }

    fn split_huge(&self, run: PageRun) {
        let meeting = self.meet_at_split.lock().unwrap().take();
        if let Some(barrier) = meeting {
            barrier.wait();
            barrier.wait();
        }
        let page = first_page(&run);
        let mut huge = self.huge();
        let first = huge.range(..=page).next_back().copied();
        // It may be split again after its parts could not be given back.
        if first.is_some_and(|first| page + run.pages <= first + self.huge_pages) {
            huge.remove(&first.unwrap());
            self.splits.fetch_add(1, Ordering::Relaxed);
        }
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        self.discard_calls.fetch_add(1, Ordering::Relaxed);
        if self.discards_left.fails() {
            return Err(SourceError::Discard);
        }
        for run in runs {
            // A huge page goes whole, alone or with its neighbours, or was split before.
            let (start, end) = (first_page(run), first_page(run) + run.pages);
            let mut huge = self.huge();
            let touched: Vec<usize> = huge
                .range(..end)
                .copied()
                .filter(|first| first + self.huge_pages > start)
                .collect();
            for first in touched {
                assert!(start <= first && first + self.huge_pages <= end);
                huge.remove(&first);
            }
        }
        let pages: usize = runs.iter().map(|run| run.pages).sum();
        self.committed_pages
            .fetch_sub(pages as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.discard(runs) }
    }
}

/// Bytes that differ from those of any other `seed`.
pub(crate) fn contents(seed: u64, size: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..size)
        .map(|_| (random.next_word() >> 16) as u8)
        .collect()
}

/// Checks that a pool's statistics add up, and agree with what the test knows to be stored.
pub(crate) fn check_stats<S: PageSource>(
    pool: &zsmalloc::Pool<S>,
    lengths: impl Iterator<Item = usize>,
) {
    let stats = pool.stats();
    // An object lies in the class for its length or in one that is larger by a sixteenth at most: so
    // in the classes up to each there are as many as that allows.
    let own_and_most: Vec<(usize, usize)> = lengths
        .map(|length| {
            let fits = stats.classes.iter().find(|c| c.class_size >= length);
            let own = fits.unwrap().class_size;
            (own, own + own / 16)
        })
        .collect();
    let mut found = 0;
    for (index, class) in stats.classes.iter().enumerate() {
        found += class.objects_used;
        let next = stats
            .classes
            .get(index + 1)
            .map_or(usize::MAX, |c| c.class_size);
        let may = own_and_most
            .iter()
            .filter(|(own, _)| *own <= class.class_size);
        let must = own_and_most.iter().filter(|(_, most)| *most < next);
        assert!((must.count()..=may.count()).contains(&found), "{class:?}");
        assert_eq!(
            class.objects_allocated,
            class.zspages * class.objects_per_zspage
        );
        assert_eq!(class.pages, class.zspages * class.pages_per_zspage);
        assert!(class.objects_used <= class.objects_allocated);
        assert_eq!(
            class.waste_bytes + class.objects_allocated * class.class_size,
            class.pages * zsmalloc::PAGE_SIZE
        );
    }
    assert_eq!(stats.objects_used(), own_and_most.len());
    assert!(stats.pages() + stats.spare_pages <= stats.resident_pages);
    assert!(stats.spare_pages <= stats.huge_pages && stats.huge_pages <= stats.resident_pages);
    assert_eq!(
        stats.resident_pages * zsmalloc::PAGE_SIZE,
        pool.resident_bytes()
    );
}
