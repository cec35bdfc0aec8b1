//! Arenas: the way from a page number to its zspage, and the free runs.
//!
//! The address range of a pool is cut into *arenas* of equal size, put to use one after another.
//! Every zspage of an arena has the same length, so the zspage that a page belongs to follows from
//! the page number by a multiplication, and an arena has exactly as many records as it can hold
//! zspages. Records live as long as the pool: a stale object word meets a record that says so,
//! never freed memory.

use std::{
    alloc::{Layout, alloc, alloc_zeroed, dealloc},
    mem::MaybeUninit,
    ptr::NonNull,
};

use crate::{
    error::AllocError,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    zspage::{Link, NO_LINK, PageNumber, Zspage},
};

/// The most pages an arena has.
pub(crate) const MAX_ARENA_PAGES: usize = 512;

const SET_WORDS: usize = MAX_ARENA_PAGES / 64;

/// Some runs of an arena: bit `n` is the `n`th run.
pub(crate) type RunBits = [u64; SET_WORDS];

/// Runs of an arena that are free in some way. Guarded by the lock of the owner's run lists, so
/// relaxed accesses do.
#[derive(Debug)]
pub(crate) struct RunSet([AtomicU64; SET_WORDS]);

impl RunSet {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    pub(crate) fn insert(&self, run: usize) {
        let bits = &self.0[run / 64];
        bits.store(
            bits.load(Ordering::Relaxed) | 1 << (run % 64),
            Ordering::Relaxed,
        );
    }

    pub(crate) fn insert_all(&self, runs: &RunBits) {
        for (bits, more) in self.0.iter().zip(runs) {
            bits.store(bits.load(Ordering::Relaxed) | more, Ordering::Relaxed);
        }
    }

    /// Takes the first run.
    pub(crate) fn pop(&self) -> Option<usize> {
        for (word, bits) in self.0.iter().enumerate() {
            let free = bits.load(Ordering::Relaxed);
            if free != 0 {
                bits.store(free & (free - 1), Ordering::Relaxed);
                return Some(word * 64 + free.trailing_zeros() as usize);
            }
        }
        None
    }

    pub(crate) fn take_all(&self) -> RunBits {
        let take = |bits: &AtomicU64| {
            let runs = bits.load(Ordering::Relaxed);
            bits.store(0, Ordering::Relaxed);
            runs
        };
        std::array::from_fn(|word| take(&self.0[word]))
    }
}

/// An arena stands on no list.
pub(crate) const NOT_LISTED: u32 = u32::MAX - 1;

/// A stretch of the range whose zspages all have the same length.
#[derive(Debug)]
pub(crate) struct Arena {
    index: u32,
    first: u32,
    run_pages: u32,
    /// `ceil(2^16 / run_pages)`: divides any offset inside an arena exactly.
    reciprocal: u32,
    /// The shard whose run lists have this arena's free runs.
    owner: usize,
    /// Free runs that have memory, and free runs that have none.
    pub(crate) warm: RunSet,
    pub(crate) cold: RunSet,
    pub(crate) next_warm: AtomicU32,
    pub(crate) next_cold: AtomicU32,
    zspages: Vec<Zspage>,
}

impl Arena {
    /// Pages of each zspage.
    pub(crate) fn run_pages(&self) -> usize {
        self.run_pages as usize
    }

    /// How many runs there are.
    pub(crate) fn runs(&self) -> usize {
        self.zspages.len()
    }

    pub(crate) fn owner(&self) -> usize {
        self.owner
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The first page of a run.
    pub(crate) fn page_of(&self, run: usize) -> PageNumber {
        PageNumber(self.first + run as u32 * self.run_pages)
    }

    /// The run that starts at `page`, which lies in this arena; `None` if none starts there.
    pub(crate) fn run_at(&self, page: PageNumber) -> Option<usize> {
        let offset = page.0 - self.first;
        let run = (offset * self.reciprocal) >> 16;
        (run * self.run_pages == offset && (run as usize) < self.runs()).then_some(run as usize)
    }
}

/// All arenas of a pool.
#[derive(Debug)]
pub(crate) struct Arenas {
    table: NonNull<AtomicPtr<Arena>>,
    count: usize,
    shift: u32,
    /// How many arenas were handed out. It may run past `count` when the range is full.
    next: AtomicUsize,
    /// Bytes of the records made so far.
    record_bytes: AtomicUsize,
}

// SAFETY: the table is an array of atomic pointers that lives as long as `self`; each is null or
// points to an `Arena`, which is Send and Sync, is published with release and freed only in drop.
unsafe impl Send for Arenas {}
// SAFETY: as above.
unsafe impl Sync for Arenas {}

impl Arenas {
    /// A table for `count` arenas of `1 << shift` pages, none of them in use.
    pub(crate) fn new(count: usize, shift: u32) -> Option<Self> {
        debug_assert!(count > 0);
        let layout = Layout::array::<AtomicPtr<Arena>>(count).ok()?;
        // The table of a large range is large too; zeroed memory is not touched until used.
        // SAFETY: the layout is not empty, as `count` is not zero.
        let table = NonNull::new(unsafe { alloc_zeroed(layout) })?.cast();
        #[cfg(loom)]
        for index in 0..count {
            // SAFETY: loom's atomics are not plain memory; each of the `count` elements is
            // initialised here before anything else sees the table.
            unsafe { table.add(index).write(AtomicPtr::new(std::ptr::null_mut())) }
        }
        Some(Self {
            table,
            count,
            shift,
            next: AtomicUsize::new(0),
            record_bytes: AtomicUsize::new(0),
        })
    }

    fn slot(&self, index: usize) -> Option<&AtomicPtr<Arena>> {
        // SAFETY: `index` is inside the table, whose bytes are zero or were set by `store`: valid
        // atomic pointers, living as long as `self`.
        (index < self.count).then(|| unsafe { self.table.add(index).as_ref() })
    }

    /// An arena that is in use.
    pub(crate) fn arena(&self, index: usize) -> Option<&Arena> {
        let arena = self.slot(index)?.load(Ordering::Acquire);
        // SAFETY: a pointer in the table is null or comes from `Box::into_raw` in `add`, which wrote
        // the record before it published it with release; the box is freed only when `self` is
        // dropped.
        unsafe { arena.as_ref() }
    }

    /// Pages of an arena.
    pub(crate) fn arena_pages(&self) -> usize {
        1 << self.shift
    }

    /// Bytes of heap that the table and the records take (what is touched of the table: an entry
    /// for each arena).
    pub(crate) fn metadata_bytes(&self) -> usize {
        let used = self.next.load(Ordering::Relaxed).min(self.count);
        used * size_of::<AtomicPtr<Arena>>() + self.record_bytes.load(Ordering::Relaxed)
    }

    /// Puts the next unused arena to use for zspages of `run_pages` pages. None of its runs is in
    /// a set yet.
    pub(crate) fn add(&self, run_pages: usize, owner: usize) -> Result<&Arena, AllocError> {
        let arena_pages = self.arena_pages();
        let count = arena_pages / run_pages;
        let mut zspages = Vec::new();
        zspages
            .try_reserve_exact(count)
            .map_err(|_| AllocError::Metadata)?;
        zspages.extend((0..count).map(|_| Zspage::new()));
        // SAFETY: the layout is not empty.
        let record: *mut Arena = unsafe { alloc(Layout::new::<Arena>()) }.cast();
        let record = NonNull::new(record).ok_or(AllocError::Metadata)?;
        // SAFETY: the memory was allocated just now with the layout of an `Arena`, by the global
        // allocator. Nothing in it needs a drop before it is written.
        let mut record = unsafe { Box::from_raw(record.cast::<MaybeUninit<Arena>>().as_ptr()) };
        let index = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (next < self.count).then_some(next + 1)
            })
            .map_err(|_| AllocError::RangeFull)?;
        self.record_bytes.fetch_add(
            size_of::<Arena>() + count * size_of::<Zspage>(),
            Ordering::Relaxed,
        );
        record.write(Arena {
            index: index as u32,
            owner,
            warm: RunSet::new(),
            cold: RunSet::new(),
            next_warm: AtomicU32::new(NOT_LISTED),
            next_cold: AtomicU32::new(NOT_LISTED),
            first: (index << self.shift) as u32,
            run_pages: run_pages as u32,
            reciprocal: (1_u32 << 16).div_ceil(run_pages as u32),
            zspages,
        });
        let slot = self.slot(index).expect("the index is below the count");
        slot.store(Box::into_raw(record).cast(), Ordering::Release);
        Ok(self.arena(index).expect("it was stored just now"))
    }

    /// The arena of a page.
    pub(crate) fn arena_of(&self, page: PageNumber) -> Option<&Arena> {
        self.arena((page.0 >> self.shift) as usize)
    }

    /// The zspage that starts at `page`, with the length of its run.
    #[inline]
    pub(crate) fn find(&self, page: PageNumber) -> Option<(&Zspage, usize)> {
        let arena = self.arena_of(page)?;
        Some((&arena.zspages[arena.run_at(page)?], arena.run_pages()))
    }

    /// The zspage that starts at `page`, which the pool knows to be one.
    pub(crate) fn zspage(&self, page: PageNumber) -> &Zspage {
        self.find(page).expect("links lead to zspages only").0
    }

    /// Puts a zspage at the front of a singly linked list.
    pub(crate) fn push(&self, head: &mut Link, page: PageNumber) {
        self.zspage(page).next.store(head.0, Ordering::Relaxed);
        *head = Link::to(page);
    }

    /// Takes the front of a singly linked list.
    pub(crate) fn pop(&self, head: &mut Link) -> Option<PageNumber> {
        let page = head.get()?;
        *head = Link(self.zspage(page).next.load(Ordering::Relaxed));
        Some(page)
    }

    /// Puts a zspage at the front of a doubly linked list.
    pub(crate) fn link(&self, head: &mut Link, page: PageNumber) {
        let zspage = self.zspage(page);
        zspage.next.store(head.0, Ordering::Relaxed);
        zspage.previous.store(NO_LINK, Ordering::Relaxed);
        if let Some(next) = head.get() {
            self.zspage(next).previous.store(page.0, Ordering::Relaxed);
        }
        *head = Link::to(page);
    }

    /// Takes a zspage out of the doubly linked list that starts at `head`.
    pub(crate) fn unlink(&self, head: &mut Link, page: PageNumber) {
        let zspage = self.zspage(page);
        let next = Link(zspage.next.load(Ordering::Relaxed));
        let previous = Link(zspage.previous.load(Ordering::Relaxed));
        match previous.get() {
            Some(previous) => self.zspage(previous).next.store(next.0, Ordering::Relaxed),
            None => *head = next,
        }
        if let Some(next) = next.get() {
            self.zspage(next)
                .previous
                .store(previous.0, Ordering::Relaxed);
        }
    }
}

impl Drop for Arenas {
    fn drop(&mut self) {
        let used = self.next.load(Ordering::Relaxed).min(self.count);
        for index in 0..used {
            let slot = self.slot(index).expect("the index is below the count");
            let arena = slot.load(Ordering::Acquire);
            if !arena.is_null() {
                // SAFETY: the pointer came from `Box::into_raw`, and nobody else has `self` now.
                drop(unsafe { Box::from_raw(arena) });
            }
        }
        let layout = Layout::array::<AtomicPtr<Arena>>(self.count).expect("it was allocated so");
        // SAFETY: the table was allocated with this layout in `new`; its elements need no drop.
        unsafe { dealloc(self.table.as_ptr().cast(), layout) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_run_is_found_and_nothing_else() {
        for shift in [4, 6, 9] {
            let arenas = Arenas::new(32, shift).unwrap();
            let mut starts = std::collections::HashSet::new();
            for run_pages in 1..=16 {
                let arena = arenas.add(run_pages, 0).unwrap();
                starts.extend((0..arena.runs()).map(|run| arena.page_of(run).0));
            }
            for page in 0..(32 << shift) {
                assert_eq!(
                    arenas.find(PageNumber(page)).is_some(),
                    starts.contains(&page)
                );
            }
            assert!(arenas.find(PageNumber(u32::MAX)).is_none());
        }
    }

    #[test]
    fn a_full_range_is_reported() {
        let arenas = Arenas::new(1, 4).unwrap();
        arenas.add(3, 0).unwrap();
        assert_eq!(arenas.add(3, 0).err(), Some(AllocError::RangeFull));
    }
}
