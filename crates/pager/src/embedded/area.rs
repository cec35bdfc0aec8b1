//! The pages of one region.

use crate::density::{BLOCK, Density};
use crate::page_state::{Entry, PageState};
use memfold_swap::Slot;
use memfold_sys::PAGE_SIZE;
use memfold_sys::memory::Mapping;
use memfold_sys::reserve::Reservation;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::engine::Shared;
use super::protected::Protected;

/// Pages that are counted together, so that reclaim need not look at each.
const CHUNK: usize = 512;
/// Set in a chunk's count once any of its pages was ever resident.
const TOUCHED: u32 = 1 << 31;

/// A region's addresses are a multiple of this and cover whole multiples.
pub const GRANULE: usize = 2 << 20;

/// A region as the engine knows it; it may outlive the region's mapping for a moment.
pub struct Area {
    /// Whose it is. (The cycle ends when the unmapped area is released.)
    pub shared: Arc<Shared>,
    /// Address of the first byte.
    pub start: usize,
    /// Number of pages.
    pub pages: usize,
    /// The mapping, until it is unmapped. Held shared while pages are moved or read ahead.
    gate: RwLock<Option<Reservation>>,
    states: Mapping,
    /// What there is besides in protection mode, where `states` are not used.
    pub protected: Option<Protected>,
    /// Resident pages in each chunk, staged ones not counted.
    chunks: Box<[AtomicU32]>,
    resident: AtomicU64,
    /// A page that was there when a touch of it faulted, plus one, and how often in a row.
    futile: AtomicU64,
    pins: Arc<Pins>,
}

/// Bits of `Area::futile` that count.
const FUTILE_BITS: u32 = 20;

/// The ranges of pages of an area that are pinned; apart from it, as a pin may outlive it.
#[derive(Default)]
pub struct Pins(RwLock<Vec<Range<usize>>>);

impl Pins {
    /// Keeps pages from being moved out from now on. Those on their way still are.
    pub fn pin(&self, pages: Range<usize>) {
        let mut pins = self.0.write().unwrap_or_else(PoisonError::into_inner);
        pins.push(pages);
    }

    /// Takes a pin back.
    pub fn unpin(&self, pages: &Range<usize>) {
        let mut pins = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = pins.iter().position(|pin| pin == pages) {
            pins.swap_remove(index);
        }
    }

    /// The pins. No other is made while they are held.
    fn all(&self) -> RwLockReadGuard<'_, Vec<Range<usize>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The area's mapping, kept while this is.
pub type Mapped<'a> = RwLockReadGuard<'a, Option<Reservation>>;

impl Area {
    /// An area over `mapping`.
    pub fn new(
        shared: Arc<Shared>,
        mapping: Reservation,
        protected: Option<Protected>,
    ) -> io::Result<Area> {
        let pages = mapping.length() / PAGE_SIZE;
        Ok(Area {
            shared,
            start: mapping.start().as_ptr() as usize,
            pages,
            protected,
            gate: RwLock::new(Some(mapping)),
            states: Mapping::anonymous((pages * size_of::<Entry>()).next_multiple_of(PAGE_SIZE))?,
            chunks: (0..pages.div_ceil(CHUNK))
                .map(|_| AtomicU32::new(0))
                .collect(),
            resident: AtomicU64::new(0),
            futile: AtomicU64::new(0),
            pins: Arc::default(),
        })
    }

    /// The states of all pages, in order.
    pub fn entries(&self) -> &[Entry] {
        // SAFETY: the mapping holds a word for each page, starts as zeros (an entry of a hole is
        // zero), is aligned to pages, lives as long as `self`, and is only used as these atomics.
        unsafe { std::slice::from_raw_parts(self.states.start().as_ptr().cast(), self.pages) }
    }

    /// The page that holds an address of the area.
    pub fn page_at(&self, address: usize) -> Option<usize> {
        let page = address.checked_sub(self.start)? / PAGE_SIZE;
        (page < self.pages).then_some(page)
    }

    /// The address of a page.
    pub fn address(&self, page: usize) -> usize {
        self.start + page * PAGE_SIZE
    }

    /// Keeps the mapping there, if it still is.
    pub fn mapped(&self) -> Option<Mapped<'_>> {
        let mapping = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        mapping.is_some().then_some(mapping)
    }

    /// Unmaps the area, once nobody moves its pages. Returns how many were in it, those claimed to
    /// be moved out included.
    pub fn unmap(&self) -> u64 {
        let mut gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        drop(gate.take());
        if let Some(protected) = &self.protected {
            protected.empty();
        }
        self.resident.swap(0, Relaxed)
    }

    /// The pages that stay in memory if these are to: in blocks, where it is kept in blocks.
    pub fn kept_with(&self, pages: Range<usize>) -> Range<usize> {
        match &self.protected {
            Some(protected) => protected.whole_blocks(pages),
            None => pages,
        }
    }

    /// Notes a page that became resident.
    pub fn arrived(&self, page: usize) {
        let chunk = &self.chunks[page / CHUNK];
        if chunk.fetch_add(1, Relaxed) == 0 && chunk.fetch_or(TOUCHED, Relaxed) & TOUCHED == 0 {
            // Its states take their first page.
            self.shared
                .record_bytes
                .fetch_add(PAGE_SIZE as u64, Relaxed);
        }
        self.resident.fetch_add(1, Relaxed);
        if self.futile(page) > 0 {
            self.note_futile(page, 0);
        }
    }

    /// How often in a row a touch of a page has faulted though the page was there, since it last
    /// arrived. Of one page at a time.
    pub fn futile(&self, page: usize) -> u64 {
        let noted = self.futile.load(Relaxed);
        let is_this = noted >> FUTILE_BITS == page as u64 + 1;
        if is_this {
            noted & ((1 << FUTILE_BITS) - 1)
        } else {
            0
        }
    }

    /// Notes how often it was.
    pub fn note_futile(&self, page: usize, times: u64) {
        if times > 0 || self.futile(page) > 0 {
            let noted = (page as u64 + 1) << FUTILE_BITS | times;
            self.futile.store(noted, Relaxed);
        }
    }

    /// Notes a page that is no longer resident.
    pub fn left(&self, page: usize) {
        self.chunks[page / CHUNK].fetch_sub(1, Relaxed);
        self.resident.fetch_sub(1, Relaxed);
    }

    /// How dense the surroundings of a page are: a first look, which costs nothing, as the count is
    /// at hand where a page arrives.
    pub fn density_of_chunk(&self, page: usize) -> Density {
        let resident = self.chunks[page / CHUNK].load(Relaxed) & !TOUCHED;
        Density::of(resident as usize * BLOCK / CHUNK)
    }

    /// Resident pages.
    pub fn resident(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// What keeps its pages in memory.
    pub fn pins(&self) -> &Arc<Pins> {
        &self.pins
    }

    /// Runs `claim` if none of the pages is pinned, and keeps others from pinning any meanwhile.
    pub fn unless_pinned(&self, pages: &Range<usize>, claim: impl FnOnce() -> bool) -> bool {
        let pins = self.pins.all();
        let overlaps = |pin: &Range<usize>| pin.start < pages.end && pages.start < pin.end;
        !pins.iter().any(overlaps) && claim()
    }

    /// Shows the resident pages of `range` that may be moved out to `claim`, in order, until it
    /// answers `false`. Young pages are passed over and are young no more, unless `all`. Returns
    /// the page to go on at.
    pub fn sweep(
        &self,
        range: Range<usize>,
        all: bool,
        mut claim: impl FnMut(usize, &Entry, PageState) -> bool,
    ) -> usize {
        // Held while pages are claimed: whoever has pinned knows that no claim follows.
        let pins = self.pins.all();
        let entries = self.entries();
        let mut page = range.start;
        while page < range.end {
            if page.is_multiple_of(CHUNK) && self.chunks[page / CHUNK].load(Relaxed) & !TOUCHED == 0
            {
                page += CHUNK;
                continue;
            }
            if let Some(pin) = pins.iter().find(|pin| pin.contains(&page)) {
                page = pin.end;
                continue;
            }
            let entry = &entries[page];
            let state = entry.load();
            match (state, state.skipped()) {
                (_, Some(passed)) if !all => {
                    entry.replace(state, passed);
                }
                (PageState::Resident { .. }, _) if !claim(page, entry, state) => return page,
                _ => {}
            }
            page += 1;
        }
        page.min(range.end)
    }

    /// Shows each slot that the area still has. To be called once nobody uses the area.
    pub fn each_slot(&self, mut show: impl FnMut(Slot)) {
        if let Some(protected) = &self.protected {
            return protected.each_slot(show);
        }
        for (chunk, entries) in self.chunks.iter().zip(self.entries().chunks(CHUNK)) {
            if chunk.load(Relaxed) & TOUCHED == 0 {
                continue;
            }
            for entry in entries {
                if let PageState::Swapped(slot) = entry.load() {
                    show(slot);
                }
            }
        }
    }

    /// Bytes of memory that the records of the area's pages take: a page of states for each chunk
    /// that was touched, as it is counted in the engine's account.
    pub fn record_bytes(&self) -> u64 {
        let touched = |chunk: &&AtomicU32| chunk.load(Relaxed) & TOUCHED != 0;
        (self.chunks.iter().filter(touched).count() * PAGE_SIZE) as u64
    }
}
