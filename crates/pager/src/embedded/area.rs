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

use super::blocks::Blocks;
use super::ledger::Ledger;
use super::worker::Worker;

/// Pages that share a resident count, so that reclaim skips chunks without any. More makes fewer counts
/// and coarser skips.
const CHUNK: usize = 512;
/// Set in a chunk's count once any of its pages was ever resident.
const TOUCHED: u32 = 1 << 31;

/// Serves the faults of an area: the engine, of which the area knows no more.
pub(super) trait FaultServer: Send + Sync {
    /// Makes the page at an address of the area resident, with those that are likely to be touched
    /// next, on behalf of `thread`. The access can be repeated then; it faults again if the page was
    /// moved out in between.
    fn serve(&self, area: &Arc<Area>, address: usize, thread: usize, worker: &mut Worker)
    -> Served;
}

/// What became of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Served {
    /// The page was resident.
    Done,
    /// Another thread brings it in from other machines, and wakes who waits for it.
    Asked,
    /// It is on its way, or too many wait: the access is to be repeated after a pause.
    Busy,
}

/// A region as the engine knows it; it may outlive the region's mapping for a moment.
pub(super) struct Area {
    /// The engine that serves its faults, which holds the area in turn until it is unmapped and
    /// released.
    pub server: Arc<dyn FaultServer>,
    /// The engine's ledger.
    pub ledger: Arc<Ledger>,
    /// Address of the first byte.
    pub start: usize,
    /// Number of pages.
    pub pages: usize,
    /// The mapping, until it is unmapped. Held shared while pages are moved or read ahead.
    gate: RwLock<Option<Reservation>>,
    states: Mapping,
    /// The blocks of an area in protection mode, where `states` are not used.
    pub blocks: Option<Blocks>,
    /// Resident pages in each chunk, staged ones not counted.
    chunks: Box<[AtomicU32]>,
    resident: AtomicU64,
    /// The page (plus one) whose touch last faulted although it was resident, and how often in a row.
    futile: AtomicU64,
    pins: Arc<Pins>,
}

/// Bits of `Area::futile` that count.
const FUTILE_BITS: u32 = 20;

/// The pinned ranges of pages of an area, which a pin may outlive.
#[derive(Default)]
pub(super) struct Pins(RwLock<Vec<Range<usize>>>);

impl Pins {
    /// Keeps pages from being claimed for page-out, if `charge` accepts as many as no other pin keeps. Claims made before
    /// are not undone. Returns whether they are pinned.
    pub(super) fn pin(&self, pages: &Range<usize>, charge: impl FnOnce(u64) -> bool) -> bool {
        let mut pins = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let charged = charge(uncovered(&pins, pages));
        if charged {
            pins.push(pages.clone());
        }
        charged
    }

    /// Removes a pin. `refund` is given how many pages no other pin keeps.
    pub(super) fn unpin(&self, pages: &Range<usize>, refund: impl FnOnce(u64)) {
        let mut pins = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = pins.iter().position(|pin| pin == pages) {
            pins.swap_remove(index);
            refund(uncovered(&pins, pages));
        }
    }

    /// The pins; none is added while the guard lives.
    fn all(&self) -> RwLockReadGuard<'_, Vec<Range<usize>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of the pages no pin keeps.
fn uncovered(pins: &[Range<usize>], pages: &Range<usize>) -> u64 {
    let within = |pin: &Range<usize>| pin.start.max(pages.start)..pin.end.min(pages.end);
    let mut parts: Vec<_> = pins
        .iter()
        .map(within)
        .filter(|part| !part.is_empty())
        .collect();
    parts.sort_unstable_by_key(|part| part.start);
    let (mut next, mut covered) = (pages.start, 0);
    for part in parts {
        covered += part.end.saturating_sub(part.start.max(next));
        next = next.max(part.end);
    }
    (pages.len() - covered) as u64
}

/// The area's mapping, kept while this is.
pub(super) type Mapped<'a> = RwLockReadGuard<'a, Option<Reservation>>;

impl Area {
    /// An area over `mapping`.
    pub(super) fn new(
        server: Arc<dyn FaultServer>,
        ledger: Arc<Ledger>,
        mapping: Reservation,
        blocks: Option<Blocks>,
    ) -> io::Result<Area> {
        let pages = mapping.length() / PAGE_SIZE;
        Ok(Area {
            server,
            ledger,
            start: mapping.start().as_ptr() as usize,
            pages,
            blocks,
            gate: RwLock::new(Some(mapping)),
            states: Mapping::sparse((pages * size_of::<Entry>()).next_multiple_of(PAGE_SIZE))?,
            chunks: (0..pages.div_ceil(CHUNK))
                .map(|_| AtomicU32::new(0))
                .collect(),
            resident: AtomicU64::new(0),
            futile: AtomicU64::new(0),
            pins: Arc::default(),
        })
    }

    /// The states of all pages, in order.
    pub(super) fn entries(&self) -> &[Entry] {
        // SAFETY: the mapping holds a word for each page, starts as zeros (an entry of a hole is
        // zero), is aligned to pages, lives as long as `self`, and is only used as these atomics.
        unsafe { std::slice::from_raw_parts(self.states.start().as_ptr().cast(), self.pages) }
    }

    /// The page that holds an address of the area.
    pub(super) fn page_at(&self, address: usize) -> Option<usize> {
        let page = address.checked_sub(self.start)? / PAGE_SIZE;
        (page < self.pages).then_some(page)
    }

    /// The address of a page.
    pub(super) fn address(&self, page: usize) -> usize {
        self.start + page * PAGE_SIZE
    }

    /// Keeps the mapping there, if it still is.
    pub(super) fn mapped(&self) -> Option<Mapped<'_>> {
        let mapping = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        mapping.is_some().then_some(mapping)
    }

    /// Unmaps the area, once no thread moves its pages. Returns how many pages were resident, those
    /// claimed for page-out included.
    pub(super) fn unmap(&self) -> u64 {
        let mut gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        drop(gate.take());
        if let Some(blocks) = &self.blocks {
            blocks.empty();
        }
        self.resident.swap(0, Relaxed)
    }

    /// The pages that stay resident if `pages` are pinned: whole blocks in protection mode.
    pub(super) fn kept_with(&self, pages: Range<usize>) -> Range<usize> {
        match &self.blocks {
            Some(blocks) => blocks.whole_blocks(pages),
            None => pages,
        }
    }

    /// Notes a page that became resident.
    pub(super) fn note_resident(&self, page: usize) {
        let chunk = &self.chunks[page / CHUNK];
        if chunk.fetch_add(1, Relaxed) == 0 && chunk.fetch_or(TOUCHED, Relaxed) & TOUCHED == 0 {
            // The states of a chunk fill one page, which is touched for the first time.
            self.ledger.add_state_bytes(PAGE_SIZE as u64);
        }
        self.resident.fetch_add(1, Relaxed);
        if self.futile(page) > 0 {
            self.note_futile(page, 0);
        }
    }

    /// How often in a row a touch of a page has faulted although the page was resident. Only the last
    /// such page is remembered.
    pub(super) fn futile(&self, page: usize) -> u64 {
        let noted = self.futile.load(Relaxed);
        let is_this = noted >> FUTILE_BITS == page as u64 + 1;
        if is_this {
            noted & ((1 << FUTILE_BITS) - 1)
        } else {
            0
        }
    }

    /// Sets how often in a row a touch of a page has faulted although it was resident.
    pub(super) fn note_futile(&self, page: usize, times: u64) {
        if times > 0 || self.futile(page) > 0 {
            let noted = (page as u64 + 1) << FUTILE_BITS | times;
            self.futile.store(noted, Relaxed);
        }
    }

    /// Notes a page that is no longer resident.
    pub(super) fn note_absent(&self, page: usize) {
        self.chunks[page / CHUNK].fetch_sub(1, Relaxed);
        self.resident.fetch_sub(1, Relaxed);
    }

    /// How dense the chunk of a page is: a cheap first look before the states of its block are read.
    pub(super) fn density_of_chunk(&self, page: usize) -> Density {
        let resident = self.chunks[page / CHUNK].load(Relaxed) & !TOUCHED;
        Density::of(resident as usize * BLOCK / CHUNK)
    }

    /// Resident pages.
    pub(super) fn resident(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// What keeps its pages in memory.
    pub(super) fn pins(&self) -> &Arc<Pins> {
        &self.pins
    }

    /// Runs `claim` if none of the pages is pinned. No pin is added meanwhile.
    pub(super) fn unless_pinned<R>(
        &self,
        pages: &Range<usize>,
        claim: impl FnOnce() -> R,
    ) -> Option<R> {
        let pins = self.pins.all();
        let overlaps = |pin: &Range<usize>| pin.start < pages.end && pages.start < pin.end;
        (!pins.iter().any(overlaps)).then(claim)
    }

    /// Calls `claim` with the resident pages of `range` that are not pinned, in order, until it returns
    /// `false`. Unless `all`, skips young pages and makes them old (second chance). Returns the page to
    /// continue at.
    pub(super) fn sweep(
        &self,
        range: Range<usize>,
        all: bool,
        mut claim: impl FnMut(usize, &Entry, PageState) -> bool,
    ) -> usize {
        // Held while pages are claimed: once a pin is set, no claim follows.
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

    /// Calls `show` with each slot of the area, which no thread uses any more.
    pub(super) fn each_slot(&self, mut show: impl FnMut(Slot)) {
        if let Some(blocks) = &self.blocks {
            return blocks.each_slot(show);
        }
        for (chunk, entries) in self.chunks.iter().zip(self.entries().chunks(CHUNK)) {
            if chunk.load(Relaxed) & TOUCHED == 0 {
                continue;
            }
            for entry in entries {
                if let PageState::Swapped(slot, _) = entry.load() {
                    show(slot);
                }
            }
        }
    }

    /// Bytes of memory that the records of the area's pages take: a page of states for each chunk
    /// that was touched, as it is counted in the engine's account.
    pub(super) fn state_bytes(&self) -> u64 {
        let touched = |chunk: &&AtomicU32| chunk.load(Relaxed) & TOUCHED != 0;
        (self.chunks.iter().filter(touched).count() * PAGE_SIZE) as u64
    }
}
