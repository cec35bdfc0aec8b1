//! Zspage records, and the way from a page number to its zspage.
//!
//! The address range of a pool is cut into *arenas* of equal size, put to use one after another.
//! Every zspage of an arena has the same length, so the zspage that a page belongs to follows from
//! the page number by a multiplication, and an arena has exactly as many records as it can hold
//! zspages. Records live as long as the pool: a stale object word meets a record that says so,
//! never freed memory.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
};

use crate::{
    error::AllocError,
    sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    word::ObjectWord,
};

/// A page of the pool's range, counted from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageNumber(pub(crate) u32);

/// The end of a list of zspages, which are linked by the number of their first page.
const NO_LINK: u32 = u32::MAX;

/// The class of a zspage record that is not in service.
const NO_CLASS: u16 = u16::MAX;

pub(crate) const BITMAP_WORDS: usize = ObjectWord::MAX_OBJECTS / 64;

/// How full a zspage in service is, or why it stands on no list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the bin's list of this fullness: `used * FULLNESS_LISTS / objects`.
    Listed(u8),
    /// The one its bin allocates from.
    Current,
    /// No slot is free.
    Full,
    /// A compactor empties it: nothing is stored in it, and it is not retired when it is empty.
    Isolated,
    /// Out of service, or taken off its bin by a thread that is putting it in or out of service.
    Detached,
}

/// Into how many lists a bin sorts its partly used zspages.
pub(crate) const FULLNESS_LISTS: u8 = 4;

impl Place {
    fn encode(self) -> u8 {
        match self {
            Place::Listed(list) => list,
            Place::Current => FULLNESS_LISTS,
            Place::Full => FULLNESS_LISTS + 1,
            Place::Isolated => FULLNESS_LISTS + 2,
            Place::Detached => FULLNESS_LISTS + 3,
        }
    }

    fn decode(raw: u8) -> Self {
        match raw {
            list if list < FULLNESS_LISTS => Place::Listed(list),
            raw if raw == FULLNESS_LISTS => Place::Current,
            raw if raw == FULLNESS_LISTS + 1 => Place::Full,
            raw if raw == FULLNESS_LISTS + 2 => Place::Isolated,
            _ => Place::Detached,
        }
    }
}

/// The record of a zspage, one cache line.
///
/// All fields are atomics so that a stale or made-up object word can be checked against any record
/// at any time without a data race. A record in service changes only under the lock of the bin that
/// `owner` and `class` name, so accesses can be relaxed: the lock orders them. To know that it
/// holds the right lock, a thread looks at `class` and then at `owner` once it has it.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Zspage {
    /// A set bit is a free slot.
    free: [AtomicU64; BITMAP_WORDS],
    next: AtomicU32,
    previous: AtomicU32,
    /// The shard whose bin has this zspage. Changed only under the lock of the old owner's bin.
    owner: AtomicU32,
    class: AtomicU16,
    used: AtomicU16,
    place: AtomicU8,
}

impl Zspage {
    fn new() -> Self {
        Self {
            free: std::array::from_fn(|_| AtomicU64::new(0)),
            next: AtomicU32::new(NO_LINK),
            previous: AtomicU32::new(NO_LINK),
            owner: AtomicU32::new(0),
            class: AtomicU16::new(NO_CLASS),
            used: AtomicU16::new(0),
            place: AtomicU8::new(Place::Detached.encode()),
        }
    }

    /// Puts the record in service for `objects` objects of `class`, all free.
    pub(crate) fn put_in_service(&self, class: usize, objects: usize, owner: usize) {
        for (word, bits) in self.free.iter().enumerate() {
            let here = objects.saturating_sub(word * 64).min(64);
            bits.store(mask(here), Ordering::Relaxed);
        }
        self.used.store(0, Ordering::Relaxed);
        self.set_place(Place::Detached);
        self.owner.store(owner as u32, Ordering::Relaxed);
        // Release: whoever sees the class sees the owner.
        self.class.store(class as u16, Ordering::Release);
    }

    /// Takes the record out of service: no word names an object in it any more.
    pub(crate) fn take_out_of_service(&self) {
        self.class.store(NO_CLASS, Ordering::Relaxed);
        self.set_place(Place::Detached);
    }

    /// The class, or `None` when out of service.
    pub(crate) fn class(&self) -> Option<usize> {
        let class = self.class.load(Ordering::Acquire);
        (class != NO_CLASS).then_some(usize::from(class))
    }

    pub(crate) fn owner(&self) -> usize {
        self.owner.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn set_owner(&self, shard: usize) {
        self.owner.store(shard as u32, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> usize {
        usize::from(self.used.load(Ordering::Relaxed))
    }

    pub(crate) fn place(&self) -> Place {
        Place::decode(self.place.load(Ordering::Relaxed))
    }

    pub(crate) fn set_place(&self, place: Place) {
        self.place.store(place.encode(), Ordering::Relaxed);
    }

    /// Whether slot `index` holds an object.
    pub(crate) fn is_stored(&self, index: usize) -> bool {
        self.free[index / 64].load(Ordering::Relaxed) & (1 << (index % 64)) == 0
    }

    /// Takes the lowest free slot.
    pub(crate) fn take_slot(&self) -> Option<usize> {
        for (word, bits) in self.free.iter().enumerate() {
            let free = bits.load(Ordering::Relaxed);
            if free != 0 {
                bits.store(free & (free - 1), Ordering::Relaxed);
                self.used
                    .store(self.used.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                return Some(word * 64 + free.trailing_zeros() as usize);
            }
        }
        None
    }

    /// Frees slot `index`; `false` if it was free already.
    pub(crate) fn free_slot(&self, index: usize) -> bool {
        let bits = &self.free[index / 64];
        let free = bits.load(Ordering::Relaxed);
        let bit = 1 << (index % 64);
        if free & bit != 0 {
            return false;
        }
        bits.store(free | bit, Ordering::Relaxed);
        self.used
            .store(self.used.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
        true
    }
}

fn mask(bits: usize) -> u64 {
    if bits == 64 {
        u64::MAX
    } else {
        (1 << bits) - 1
    }
}

/// A list of zspages through their records: the number of the first page, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link(u32);

impl Link {
    pub(crate) const NONE: Self = Self(NO_LINK);

    pub(crate) fn to(page: PageNumber) -> Self {
        Self(page.0)
    }

    pub(crate) fn get(self) -> Option<PageNumber> {
        (self.0 != NO_LINK).then_some(PageNumber(self.0))
    }
}

/// A stretch of the range whose zspages all have the same length.
#[derive(Debug)]
pub(crate) struct Arena {
    first: u32,
    run_pages: u32,
    /// `ceil(2^16 / run_pages)`: divides any offset inside an arena exactly.
    reciprocal: u32,
    zspages: Vec<Zspage>,
}

impl Arena {
    /// Pages of each zspage.
    pub(crate) fn run_pages(&self) -> usize {
        self.run_pages as usize
    }

    /// The first pages of all zspages, in address order.
    pub(crate) fn runs(&self) -> impl DoubleEndedIterator<Item = PageNumber> + use<> {
        let (first, pages) = (self.first, self.run_pages);
        (0..self.zspages.len() as u32).map(move |index| PageNumber(first + index * pages))
    }

    /// The zspage that starts at `page`, which lies in this arena; `None` if none starts there.
    fn zspage_at(&self, page: PageNumber) -> Option<&Zspage> {
        let offset = page.0 - self.first;
        let index = (offset * self.reciprocal) >> 16;
        if index * self.run_pages != offset {
            return None;
        }
        self.zspages.get(index as usize)
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

    fn arena(&self, index: usize) -> Option<&Arena> {
        let arena = self.slot(index)?.load(Ordering::Acquire);
        // SAFETY: a pointer in the table is null or comes from `Box::into_raw` in `add`, published
        // with release, and the box is freed only when `self` is dropped.
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

    /// Puts the next unused arena to use for zspages of `run_pages` pages.
    pub(crate) fn add(&self, run_pages: usize) -> Result<&Arena, AllocError> {
        let arena_pages = self.arena_pages();
        let count = arena_pages / run_pages;
        let mut zspages = Vec::new();
        zspages
            .try_reserve_exact(count)
            .map_err(|_| AllocError::Metadata)?;
        zspages.extend((0..count).map(|_| Zspage::new()));
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
        let arena = Box::new(Arena {
            first: (index << self.shift) as u32,
            run_pages: run_pages as u32,
            reciprocal: (1_u32 << 16).div_ceil(run_pages as u32),
            zspages,
        });
        let slot = self.slot(index).expect("the index is below the count");
        slot.store(Box::into_raw(arena), Ordering::Release);
        Ok(self.arena(index).expect("it was stored just now"))
    }

    /// The zspage that starts at `page`, with the length of its run.
    pub(crate) fn find(&self, page: PageNumber) -> Option<(&Zspage, usize)> {
        let arena = self.arena((page.0 >> self.shift) as usize)?;
        Some((arena.zspage_at(page)?, arena.run_pages()))
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
                let arena = arenas.add(run_pages).unwrap();
                starts.extend(arena.runs().map(|page| page.0));
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
        arenas.add(3).unwrap();
        assert_eq!(arenas.add(3).err(), Some(AllocError::RangeFull));
    }

    #[test]
    fn slots_come_and_go() {
        let zspage = Zspage::new();
        zspage.put_in_service(0, 100, 0);
        let taken: Vec<usize> = std::iter::from_fn(|| zspage.take_slot()).collect();
        assert_eq!(taken, (0..100).collect::<Vec<_>>());
        assert!(zspage.free_slot(70) && !zspage.free_slot(70));
        assert!(!zspage.is_stored(70) && zspage.is_stored(71));
        assert_eq!((zspage.used(), zspage.take_slot()), (99, Some(70)));
    }
}
