//! Arenas: from a page number to its zspage, and the sets of free runs.
//!
//! A pool's address range is divided into *extents*, and these into *units* of 16 pages. An *arena*
//! is a range of units of one extent in which all zspages have the same length, so a page number
//! leads to its zspage by a multiplication, and an arena has exactly as many records as it can hold
//! zspages. Arenas are short, so that little of an extent is set aside for zspages of a rare
//! length. Records live as long as the pool: a stale object word finds a record that refuses it,
//! never freed memory.

use std::{
    alloc::{Layout, alloc},
    mem::MaybeUninit,
    ops::Range,
    ptr::NonNull,
};

use crate::{
    error::AllocError,
    extent::Extent,
    geometry::{MAX_EXTENT_PAGES, PageNumber, UNIT_PAGES, UNIT_SHIFT},
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    table::{Table, Zero},
    zspage::{Link, NO_LINK, Zspage},
};

/// The most runs of an arena: one for each bit of a set.
const MAX_RUNS: usize = u64::BITS as usize;

/// Units of an arena for runs of `run_pages` pages. Few, because half an arena of each length is
/// unused on average, but enough for the runs to fill it almost exactly. Arenas of the rare longest
/// runs leave 1/15 or 1/8 over, which is less than a longer arena would leave unused.
fn units_for(run_pages: usize) -> usize {
    match run_pages {
        14 | 15 => 1,
        7 | 9 => 4,
        11 => 7,
        13 => 5,
        _ => (run_pages >> run_pages.trailing_zeros()).max(2),
    }
}

/// Free runs of an arena. Guarded by the lock of the owner's run lists, so relaxed accesses
/// suffice.
#[derive(Debug)]
pub(crate) struct RunSet(AtomicU64);

impl RunSet {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn bits(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn contains(&self, run: usize) -> bool {
        self.bits() & 1 << run != 0
    }

    pub(crate) fn insert(&self, run: usize) {
        self.0.store(self.bits() | 1 << run, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, run: usize) {
        self.0.store(self.bits() & !(1 << run), Ordering::Relaxed);
    }

    /// Removes the first run and returns it.
    pub(crate) fn pop(&self) -> Option<usize> {
        let free = self.bits();
        self.0.store(free & free.wrapping_sub(1), Ordering::Relaxed);
        (free != 0).then(|| free.trailing_zeros() as usize)
    }
}

/// Link of an arena that is on no list.
pub(crate) const NOT_LISTED: u32 = u32::MAX - 1;

/// A part of an extent whose zspages all have the same length.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Its first unit.
    index: u32,
    units: u32,
    first: u32,
    /// The same, counted from the first page of the extent.
    offset: u32,
    run_pages: u32,
    /// `ceil(2^16 / run_pages)`: divides any offset inside an arena exactly.
    reciprocal: u32,
    /// Its extent, and the shard whose run lists have its free runs.
    extent: u32,
    owner: usize,
    /// Free runs that are resident, and those that are not, or only in part.
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

    pub(crate) fn extent(&self) -> usize {
        self.extent as usize
    }

    /// The pages of a run, counted from the first of the extent.
    pub(crate) fn pages_of(&self, run: usize) -> Range<usize> {
        let start = self.offset as usize + run * self.run_pages();
        start..start + self.run_pages()
    }

    /// The runs that overlap a range of pages of the extent.
    pub(crate) fn runs_at(&self, pages: &Range<usize>) -> Range<usize> {
        let run_of = |page: usize| page.saturating_sub(self.offset as usize) / self.run_pages();
        let end = pages.end + self.run_pages() - 1;
        run_of(pages.start).min(self.runs())..run_of(end).min(self.runs())
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

// SAFETY: a pointer is a null pointer when it is zero, and has no drop.
unsafe impl Zero for AtomicPtr<Arena> {
    fn zero() -> Self {
        Self::new(std::ptr::null_mut())
    }
}

/// All arenas of a pool, and the extents they lie in.
#[derive(Debug)]
pub(crate) struct Arenas {
    /// The arena of each unit, or null.
    table: Table<AtomicPtr<Arena>>,
    extents: Table<Extent>,
    extent_units: usize,
    /// Units of a block of an extent.
    block_units: usize,
    /// Extents in use. It may exceed their number when the range is full.
    next: AtomicUsize,
    /// Free pages of huge pages that are partly in use.
    spare_pages: AtomicUsize,
    /// Bytes of the records made so far.
    record_bytes: AtomicUsize,
}

impl Arenas {
    /// Records for `count` extents of `extent_pages` pages, in blocks of `block_pages`, both
    /// powers of two. None of them is in use.
    pub(crate) fn new(count: usize, extent_pages: usize, block_pages: usize) -> Option<Self> {
        debug_assert!(extent_pages.is_power_of_two() && block_pages.is_power_of_two());
        debug_assert!((block_pages..=MAX_EXTENT_PAGES).contains(&extent_pages));
        debug_assert!(block_pages >= UNIT_PAGES);
        let extent_units = extent_pages / UNIT_PAGES;
        Some(Self {
            table: Table::new(count * extent_units)?,
            extents: Table::new(count)?,
            extent_units,
            block_units: block_pages / UNIT_PAGES,
            next: AtomicUsize::new(0),
            spare_pages: AtomicUsize::new(0),
            record_bytes: AtomicUsize::new(0),
        })
    }

    /// The arena of a unit.
    pub(crate) fn arena(&self, unit: usize) -> Option<&Arena> {
        let arena = self.table.get(unit)?.load(Ordering::Acquire);
        // SAFETY: a pointer in the table is null or comes from `Box::into_raw` in `add`, which wrote
        // the record before it published it with release; the box is freed only when `self` is
        // dropped.
        unsafe { arena.as_ref() }
    }

    /// Pages of an extent.
    pub(crate) fn extent_pages(&self) -> usize {
        self.extent_units * UNIT_PAGES
    }

    /// Pages of a block.
    pub(crate) fn block_pages(&self) -> usize {
        self.block_units * UNIT_PAGES
    }

    /// The blocks of an extent, each as its units.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let length = self.block_units;
        (0..self.extent_units)
            .step_by(length)
            .map(move |start| start..start + length)
    }

    /// The blocks that pages of an extent lie in, and which of the pages are in each.
    pub(crate) fn blocks_of(
        &self,
        pages: &Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let (pages, length) = (pages.clone(), self.block_pages());
        let first = pages.start - pages.start % length;
        (first..pages.end).step_by(length).map(move |start| {
            let units = start / UNIT_PAGES..(start + length) / UNIT_PAGES;
            (units, pages.start.max(start)..pages.end.min(start + length))
        })
    }

    /// An extent in use.
    pub(crate) fn extent(&self, index: usize) -> &Extent {
        self.extents
            .get(index)
            .expect("extents in use are in the table")
    }

    /// The number of extents in use.
    pub(crate) fn extents_used(&self) -> usize {
        self.next.load(Ordering::Relaxed).min(self.extents.len())
    }

    /// The first page of an extent.
    pub(crate) fn first_page(&self, extent: usize) -> PageNumber {
        PageNumber((extent * self.extent_pages()) as u32)
    }

    /// The arenas that lie in an extent.
    pub(crate) fn arenas_in(&self, extent: usize) -> impl Iterator<Item = &Arena> {
        let first = extent * self.extent_units;
        let end = first + self.extent(extent).assigned();
        let mut unit = first;
        std::iter::from_fn(move || {
            // The last arena is missing until it is published.
            let arena = (unit < end).then(|| self.arena(unit)).flatten()?;
            unit += arena.units as usize;
            Some(arena)
        })
    }

    pub(crate) fn spare_pages(&self) -> usize {
        self.spare_pages.load(Ordering::Relaxed)
    }

    /// Counts a change of a shard's spare pages.
    pub(crate) fn spare_changed(&self, before: usize, after: usize) {
        if before != after {
            self.spare_pages
                .fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Bytes of heap of the tables, as far as they were touched, and of the records.
    pub(crate) fn metadata_bytes(&self) -> usize {
        let extent_bytes = size_of::<Extent>() + self.extent_units * size_of::<AtomicPtr<Arena>>();
        self.extents_used() * extent_bytes + self.record_bytes.load(Ordering::Relaxed)
    }

    /// The next unused extent.
    pub(crate) fn add_extent(&self) -> Result<usize, AllocError> {
        self.next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (next < self.extents.len()).then_some(next + 1)
            })
            .map_err(|_| AllocError::RangeFull)
    }

    /// The units of an extent that an arena for runs of `run_pages` pages gets, behind those
    /// already assigned; zero if none is left.
    pub(crate) fn units_for(&self, extent: &Extent, run_pages: usize) -> usize {
        units_for(run_pages).min(self.extent_units - extent.assigned())
    }

    pub(crate) fn has_room(&self, extent: &Extent) -> bool {
        extent.assigned() < self.extent_units
    }

    /// Makes an arena for zspages of `run_pages` pages in these units of an extent, which the
    /// caller has assigned. Its runs are in no set yet.
    pub(crate) fn add(
        &self,
        extent: usize,
        units: Range<usize>,
        run_pages: usize,
        owner: usize,
    ) -> Result<&Arena, AllocError> {
        let count = (units.len() * UNIT_PAGES / run_pages).min(MAX_RUNS);
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
        self.record_bytes.fetch_add(
            size_of::<Arena>() + count * size_of::<Zspage>(),
            Ordering::Relaxed,
        );
        let index = extent * self.extent_units + units.start;
        record.write(Arena {
            index: index as u32,
            units: units.len() as u32,
            first: (index * UNIT_PAGES) as u32,
            offset: (units.start * UNIT_PAGES) as u32,
            run_pages: run_pages as u32,
            reciprocal: (1_u32 << 16).div_ceil(run_pages as u32),
            extent: extent as u32,
            owner,
            warm: RunSet::new(),
            cold: RunSet::new(),
            next_warm: AtomicU32::new(NOT_LISTED),
            next_cold: AtomicU32::new(NOT_LISTED),
            zspages,
        });
        let record: *mut Arena = Box::into_raw(record).cast();
        for unit in index..index + units.len() {
            let slot = self.table.get(unit).expect("an extent's units exist");
            slot.store(record, Ordering::Release);
        }
        Ok(self.arena(index).expect("it was stored just now"))
    }

    /// The arena of a page.
    #[inline]
    pub(crate) fn arena_of(&self, page: PageNumber) -> Option<&Arena> {
        self.arena((page.0 >> UNIT_SHIFT) as usize)
    }

    /// The zspage that starts at `page`, with the length of its run.
    #[inline]
    pub(crate) fn find(&self, page: PageNumber) -> Option<(&Zspage, usize)> {
        let arena = self.arena_of(page)?;
        Some((&arena.zspages[arena.run_at(page)?], arena.run_pages()))
    }

    /// The zspage that starts at `page`, which must be one.
    pub(crate) fn zspage(&self, page: PageNumber) -> &Zspage {
        self.find(page).expect("links lead to zspages only").0
    }

    /// Pushes a zspage to the front of a singly linked list.
    pub(crate) fn push(&self, head: &mut Link, page: PageNumber) {
        self.zspage(page).next.store(head.0, Ordering::Relaxed);
        *head = Link::to(page);
    }

    /// Pops the front of a singly linked list.
    pub(crate) fn pop(&self, head: &mut Link) -> Option<PageNumber> {
        let page = head.get()?;
        *head = Link(self.zspage(page).next.load(Ordering::Relaxed));
        Some(page)
    }

    /// Inserts a zspage at the front of a doubly linked list.
    pub(crate) fn link(&self, head: &mut Link, page: PageNumber) {
        let zspage = self.zspage(page);
        zspage.next.store(head.0, Ordering::Relaxed);
        zspage.previous.store(NO_LINK, Ordering::Relaxed);
        if let Some(next) = head.get() {
            self.zspage(next).previous.store(page.0, Ordering::Relaxed);
        }
        *head = Link::to(page);
    }

    /// Removes a zspage from the doubly linked list that starts at `head`.
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
        for extent in 0..self.extents_used() {
            let first = extent * self.extent_units;
            let mut last = std::ptr::null_mut();
            for unit in first..first + self.extent(extent).assigned() {
                let slot = self.table.get(unit).expect("an extent's units exist");
                let arena = slot.load(Ordering::Acquire);
                // The units of an arena are contiguous.
                if !arena.is_null() && arena != last {
                    // SAFETY: the pointer came from `Box::into_raw`; `&mut self` excludes other
                    // users, and only the first of an arena's entries frees it.
                    drop(unsafe { Box::from_raw(arena) });
                }
                last = arena;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::geometry::MAX_CHAIN_PAGES;

    #[test]
    fn every_run_is_found_and_nothing_else() {
        for extent_pages in [16, 64, 512] {
            let arenas = Arenas::new(32, extent_pages, 16).unwrap();
            let mut starts = std::collections::HashSet::new();
            let mut index = arenas.add_extent().unwrap();
            for run_pages in 1..=16 {
                let mut extent = arenas.extent(index);
                if !arenas.has_room(extent) {
                    index = arenas.add_extent().unwrap();
                    extent = arenas.extent(index);
                }
                let (start, units) = (extent.assigned(), arenas.units_for(extent, run_pages));
                extent.set_assigned(start + units);
                let arena = arenas
                    .add(index, start..start + units, run_pages, 0)
                    .unwrap();
                starts.extend((0..arena.runs()).map(|run| arena.page_of(run).0));
            }
            for page in 0..(32 * extent_pages as u32) {
                assert_eq!(
                    arenas.find(PageNumber(page)).is_some(),
                    starts.contains(&page)
                );
            }
            assert!(arenas.find(PageNumber(u32::MAX)).is_none());
        }
    }

    #[test]
    fn the_runs_at_some_pages_are_those_that_meet_them() {
        let arenas = Arenas::new(16, 512, 16).unwrap();
        for run_pages in 1..=16 {
            let index = arenas.add_extent().unwrap();
            arenas.extent(index).set_assigned(20);
            let arena = arenas.add(index, 13..20, run_pages, 0).unwrap();
            for start in (0..512).step_by(16) {
                let pages = start..start + 16;
                let meets = |&run: &usize| {
                    let own = arena.pages_of(run);
                    own.start < pages.end && pages.start < own.end
                };
                assert!(arena.runs_at(&pages).eq((0..arena.runs()).filter(meets)));
            }
        }
    }

    #[test]
    fn a_full_range_is_reported() {
        let arenas = Arenas::new(1, 16, 16).unwrap();
        assert_eq!(arenas.add_extent(), Ok(0));
        assert_eq!(arenas.add_extent(), Err(AllocError::RangeFull));
    }

    #[test]
    fn an_arena_has_hardly_a_page_left_over() {
        for run_pages in 1..=MAX_CHAIN_PAGES {
            let pages = units_for(run_pages) * UNIT_PAGES;
            let left_over = pages % run_pages;
            assert!(
                left_over * 39 < pages || run_pages >= 14,
                "{run_pages}: {left_over}"
            );
            assert!(pages / run_pages <= MAX_RUNS && pages <= MAX_EXTENT_PAGES / 4);
        }
    }
}
