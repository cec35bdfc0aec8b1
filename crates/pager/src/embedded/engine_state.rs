//! What all threads of an engine share.

use super::account::Account;
use super::area::Area;
use super::blocks::Blocks;
use super::config::Mode;
use super::error::Error;
use super::event::Event;
use super::hand::Hand;
use super::ledger::Ledger;
use super::limits::GRANULE;
use super::mover::Mover;
use super::registry;
use super::remote_queue::RemoteFaults;
use super::span_queue::Readahead;
use super::stats::{Counters, Gauges, Stats};
use super::streams::Streams;
use crate::backoff::CompressionPolicy;
use crate::pool_memory::MappedSource;
use crate::replacement::Replacement;
use crate::sync::lock;
use memfold_swap::{RemoteUsage, Slot, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::owned_uffd::{ExposedUffd, borrow};
use memfold_sys::reserve::Reservation;
use memfold_sys::signal::block_all;
use memfold_sys::uffd::Uffd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError, RwLock};

/// The most bytes of a region, which [`Error::Length`] names: half of the address space.
const LONGEST: usize = 1 << 46;

/// The state of an engine that faults, reclaim and advice share.
pub(crate) struct EngineState {
    pub(super) mode: Mode,
    pub(super) ledger: Arc<Ledger>,
    pub(super) uffd: Option<ExposedUffd>,
    /// By what pages get to the stage, where there is a userfaultfd.
    pub(super) mover: Option<Mover>,
    /// Memory that victims are moved to before they are compressed: a batch for each worker.
    pub(super) stage: Reservation,
    pub(super) space: SwapSpace<MappedSource>,
    pub(super) account: Account,
    pub(super) compression: CompressionPolicy,
    pub(super) areas: RwLock<Vec<Arc<Area>>>,
    pub(super) hand: Mutex<Hand>,
    /// Which list leaves, and what is on the inactive one.
    pub(super) replacement: Mutex<Replacement>,
    /// Pages that left so far, the clock of refault distances. Relaxed: it is an estimate.
    pub(super) evictions: AtomicU32,
    /// Unmapped areas whose slots are not released yet.
    pub(super) pending_release: Mutex<Vec<Arc<Area>>>,
    /// Held by the listener while it serves a fault. The faulting thread may run on, and unmap the
    /// region, before the listener has copied all pages of the window.
    pub(super) listening: Mutex<()>,
    /// A futex: the number of areas that are unmapped and not released, those being released included.
    /// Waiters are woken when it becomes 0.
    pub(super) unreleased: AtomicU32,
    /// Slots of swapped-in pages, to be released in bulk off the fault path.
    pub(super) deferred_frees: Mutex<Vec<Slot>>,
    pub(super) reclaim_event: Event,
    pub(super) readahead: Readahead,
    pub(super) streams: Streams,
    /// Pages on other machines, if they may go there.
    pub(super) remote: Option<RemoteFaults>,
    pub(super) counters: Counters,
    pub(super) mapped_bytes: AtomicU64,
    pub(super) stopping: AtomicBool,
    /// Met by the thread that keeps the userfaultfd open, once it does, and by the one that makes the engine.
    pub(super) keeps: Barrier,
}

/// Rounds a region's length up to pages.
fn whole_pages(length: usize) -> Result<usize, Error> {
    let rounded = length.checked_next_multiple_of(PAGE_SIZE);
    let allowed = rounded.filter(|length| (1..=LONGEST).contains(length));
    allowed.ok_or(Error::Length(length))
}

impl EngineState {
    /// The userfaultfd.
    ///
    /// # Panics
    /// In a mode that has none.
    pub(super) fn uffd(&self) -> Uffd {
        borrow(self.uffd.as_ref().expect("areas of this mode have one"))
    }

    /// By what pages get to the stage.
    ///
    /// # Panics
    /// As [`EngineState::uffd`].
    pub(super) fn mover(&self) -> Mover {
        self.mover.expect("areas of this mode have one")
    }

    /// Maps an area of `length` bytes, rounded up to pages.
    pub(super) fn map(self: &Arc<Self>, length: usize) -> Result<Arc<Area>, Error> {
        if !self.ledger.owner.is_here() {
            return Err(Error::Forked);
        }
        let _blocked = block_all();
        let rounded = whole_pages(length)?;
        let cannot_map = || Error::system("map a region");
        let mapping = Reservation::new(rounded, GRANULE).map_err(cannot_map())?;
        let blocks = if self.mode == Mode::Protection {
            Some(Blocks::new(&mapping, self.account.allowed_pages()).map_err(cannot_map())?)
        } else {
            mapping.make_anonymous(0).map_err(cannot_map())?;
            self.uffd()
                .register(mapping.start().as_ptr() as u64, rounded as u64)
                .map_err(|errno| Error::system("register a region")(errno.into()))?;
            None
        };
        let area =
            Area::new(self.clone(), self.ledger.clone(), mapping, blocks).map_err(cannot_map())?;
        let area = Arc::new(area);
        self.mapped_bytes
            .fetch_add(rounded as u64, Ordering::Relaxed);
        registry::insert(&area);
        self.areas
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(area.clone());
        Ok(area)
    }

    /// Unmaps an area, which frees its resident pages at once, and leaves its slots to the reclaim
    /// thread.
    pub(super) fn unmap(&self, area: &Arc<Area>) {
        if !self.ledger.owner.is_here() {
            return;
        }
        let _blocked = block_all();
        registry::remove(area);
        self.areas
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, area));
        let mut hand = lock(&self.hand);
        hand.cold.retain(|(other, _)| !Arc::ptr_eq(other, area));
        drop(hand);
        // The area is no longer in `areas`: once the lock was free, the listener is done with it.
        drop(lock(&self.listening));
        self.account.release(area.unmap());
        let length = (area.pages * PAGE_SIZE) as u64;
        self.mapped_bytes.fetch_sub(length, Ordering::Relaxed);
        self.unreleased.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending_release).push(area.clone());
        self.reclaim_event.set();
    }

    /// The engine's area that an address belongs to.
    pub(super) fn area_at(&self, address: usize) -> Option<Arc<Area>> {
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        let mut areas = areas.iter();
        areas.find(|area| area.page_at(address).is_some()).cloned()
    }

    pub(super) fn refresh_account(&self) {
        self.account.refresh(|| self.other_bytes());
    }

    /// Bytes of pool and records.
    pub(super) fn other_bytes(&self) -> u64 {
        self.space.pool_bytes() + self.space.metadata_bytes() + self.ledger.state_bytes()
    }

    /// Notes how many pages reclaim moved out, and how many it put back because they do not compress.
    pub(super) fn note_gain(&self, out: usize, refused: usize) {
        if self.compression.note(out, refused) {
            self.relax_limit();
        }
    }

    /// Lets the program exceed the limit for a while: nothing more can be moved out, or nothing is gained
    /// by it.
    pub(super) fn relax_limit(&self) {
        self.account.relax_limit();
        self.refresh_account();
    }

    pub(super) fn stats(&self) -> Stats {
        Stats::new(self.mode, &self.counters, self.gauges())
    }

    /// Statistics of the store, if there is one. A forked child has none: a thread of its parent's may have held a lock
    /// of the store's at the fork.
    pub(super) fn remote_usage(&self) -> Option<RemoteUsage> {
        let remote = self.remote.as_ref()?;
        if !self.ledger.owner.is_here() {
            return Some(RemoteUsage::default());
        }
        Some(remote.usage())
    }

    fn gauges(&self) -> Gauges {
        let page = PAGE_SIZE as u64;
        let usage = self.space.usage();
        let limit = self.account.limit();
        let remote = self.remote_usage().unwrap_or_default();
        Gauges {
            limit_bytes: limit.total_bytes.unwrap_or(0),
            resident_limit_bytes: self.account.allowed_pages() * page,
            resident_bytes: self.account.resident_pages() * page,
            peak_resident_bytes: self.account.peak_pages() * page,
            pool_bytes: usage.pool_bytes,
            metadata_bytes: usage.metadata_bytes + self.ledger.state_bytes(),
            mapped_bytes: self.mapped_bytes.load(Ordering::Relaxed),
            pinned_bytes: self.account.pinned_pages() * page,
            stored_pages: usage.stored_pages,
            same_filled_pages: usage.same_filled_pages,
            stored_bytes: usage.stored_bytes,
            over_limit_pages: self.account.excess_pages(),
            remote_pages: usage.remote_pages,
            remote_bytes: usage.remote_bytes,
            remote_pages_out: remote.pages_out,
            remote_pages_in: remote.pages_in,
            remote_waiting: remote.waiting,
            remote_retries: remote.retries,
            remote_failures: remote.store_failures + remote.load_failures,
            remote_lost_pages: remote.lost_pages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_that_the_error_names() {
        assert_eq!(whole_pages(1).unwrap(), PAGE_SIZE);
        assert_eq!(whole_pages(LONGEST - 1).unwrap(), LONGEST);
        assert_eq!(whole_pages(1 << 46).unwrap(), LONGEST);
        for length in [0, LONGEST + 1, usize::MAX] {
            let error = whole_pages(length).unwrap_err().to_string();
            assert!(error.contains("from 1 to 2^46"), "{error}");
        }
    }
}
