//! The account of an engine's memory.

use super::limits::LEAST_PAGES;
use crate::backoff::LimitRelief;
use crate::density::has_ample_room;
use crate::options::Limit;
use crate::sync::lock;
use crate::watermarks::Watermarks;
use memfold_sys::PAGE_SIZE;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// Pages that are resident, staged ones included, against what the limit leaves for them.
#[derive(Debug)]
pub(super) struct Account {
    limit: Limit,
    resident: AtomicU64,
    /// Pages that pool and records leave of the limit.
    left: AtomicU64,
    /// Pages that may be resident now: those of `left`, or what the relaxed limit allows.
    allowed: AtomicU64,
    relief: LimitRelief,
    /// One refresh at a time: an older value must not replace a newer one.
    refreshing: Mutex<()>,
    pinned: AtomicU64,
    peak: AtomicU64,
    excess: AtomicU64,
    /// Batches of victims that are claimed and not yet moved out or put back.
    held_batches: AtomicU64,
}

/// See [`Account::hold_batch`].
pub(super) struct HeldBatch<'a>(&'a Account);

impl Drop for HeldBatch<'_> {
    fn drop(&mut self) {
        self.0.held_batches.fetch_sub(1, Relaxed);
    }
}

/// Background reclaim starts a thirty-second of the limit below it, so that the program has room to
/// fault in while victims are compressed on another CPU. Direct reclaim starts at the limit.
fn watermarks(allowed: u64) -> Watermarks {
    let low = (allowed / 32).clamp(32, 8192);
    Watermarks {
        min: 0,
        low,
        high: 2 * low,
    }
}

impl Account {
    pub(super) fn new(limit: Limit) -> Account {
        let account = Account {
            limit,
            resident: AtomicU64::new(0),
            left: AtomicU64::new(0),
            allowed: AtomicU64::new(0),
            relief: LimitRelief::new(Instant::now()),
            refreshing: Mutex::new(()),
            pinned: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            excess: AtomicU64::new(0),
            held_batches: AtomicU64::new(0),
        };
        account.refresh(|| 0);
        account
    }

    /// Works out anew what is allowed; `other` returns the bytes of pool and records.
    pub(super) fn refresh(&self, other: impl FnOnce() -> u64) {
        let _one = lock(&self.refreshing);
        let other = other();
        let page = PAGE_SIZE as u64;
        let left = self
            .limit
            .total_bytes
            .map_or(u64::MAX, |total| total.saturating_sub(other));
        let left = left.min(self.limit.resident_bytes.unwrap_or(u64::MAX)) / page;
        let left = left.max(LEAST_PAGES);
        let allowed = left.max(self.relief.bytes(Instant::now()) / page);
        self.left.store(left, Relaxed);
        self.allowed.store(allowed, Relaxed);
    }

    /// Pages that may become resident without direct reclaim, and the watermarks for them.
    fn free(&self) -> (u64, Watermarks) {
        let allowed = self.allowed.load(Relaxed);
        let free = allowed.saturating_sub(self.resident.load(Relaxed));
        (free, watermarks(allowed))
    }

    /// Takes room for `pages` if there is.
    pub(super) fn reserve(&self, pages: u64) -> bool {
        let mut left = 0;
        // What does not fit is never in the account: other threads would find no room meanwhile. Acquire: room that
        // `moved_out` has given back is seen with what the pool left of it.
        let taken = self.resident.fetch_update(Acquire, Acquire, |before| {
            left = self.left.load(Relaxed);
            let allowed = self.allowed.load(Relaxed);
            let free = allowed.saturating_sub(before);
            (!watermarks(allowed).needs_direct_reclaim(free, pages)).then_some(before + pages)
        });
        if let Ok(before) = taken {
            self.note_peak(before + pages, left);
        }
        taken.is_ok()
    }

    /// A batch of victims that is claimed, until what becomes of it is in the account.
    pub(super) fn hold_batch(&self) -> HeldBatch<'_> {
        self.held_batches.fetch_add(1, Relaxed);
        HeldBatch(self)
    }

    /// Whether victims are claimed by any thread: they may yet leave.
    pub(super) fn has_held_batches(&self) -> bool {
        self.held_batches.load(Relaxed) > 0
    }

    /// The time until a relaxation of the limit ends; `None` if there is none.
    pub(super) fn relief_left(&self) -> Option<Duration> {
        self.relief.left(Instant::now())
    }

    /// Takes room that there is not.
    pub(super) fn reserve_beyond(&self, pages: u64) {
        let now = self.resident.fetch_add(pages, Relaxed) + pages;
        self.note_peak(now, 0);
    }

    /// Nothing more can be moved out. To be followed by [`Account::refresh`].
    pub(super) fn relax_limit(&self) {
        let resident = self.resident.load(Relaxed) * PAGE_SIZE as u64;
        self.relief.relax(resident, Instant::now());
    }

    /// `left` is what was left when room was taken: a pool that has grown since takes no room that was there.
    fn note_peak(&self, now: u64, left: u64) {
        if now > self.peak.load(Relaxed) {
            self.peak.fetch_max(now, Relaxed);
        }
        let excess = now.saturating_sub(left.max(self.left.load(Relaxed)));
        if excess > 0 {
            self.excess.fetch_max(excess, Relaxed);
        }
    }

    /// Pages were moved out; `other` returns the bytes of pool and records. What they take there is subtracted first: it
    /// is room for no other thread.
    pub(super) fn moved_out(&self, pages: u64, other: impl FnOnce() -> u64) {
        self.refresh(other);
        self.release(pages);
    }

    /// Gives room back.
    pub(super) fn release(&self, pages: u64) {
        if pages > 0 {
            self.resident.fetch_sub(pages, Release);
        }
    }

    /// Whether background reclaim is to start.
    pub(super) fn is_below_low(&self) -> bool {
        let (free, watermarks) = self.free();
        watermarks.is_below_low(free)
    }

    /// Whether background reclaim may stop.
    pub(super) fn is_at_high(&self) -> bool {
        let (free, watermarks) = self.free();
        watermarks.is_at_high(free)
    }

    /// Whether readahead may take `pages`: they wake no reclaim.
    pub(super) fn has_spare(&self, pages: u64) -> bool {
        let (free, watermarks) = self.free();
        watermarks.has_spare(free, pages)
    }

    /// Whether `pages` fit far from where reclaim works, so that nothing has to leave for them soon.
    pub(super) fn has_ample(&self, pages: u64) -> bool {
        let allowed = self.allowed.load(Relaxed);
        let reclaim_stops = allowed - watermarks(allowed).high;
        has_ample_room(self.resident.load(Relaxed), pages, allowed, reclaim_stops)
    }

    /// Pins pages if that leaves enough to work in.
    pub(super) fn pin(&self, pages: u64) -> bool {
        let most = self.left.load(Relaxed) - LEAST_PAGES / 2;
        let pinned = self.pinned.fetch_update(Relaxed, Relaxed, |before| {
            (before + pages <= most).then_some(before + pages)
        });
        pinned.is_ok()
    }

    pub(super) fn unpin(&self, pages: u64) {
        self.pinned.fetch_sub(pages, Relaxed);
    }

    pub(super) fn limit(&self) -> Limit {
        self.limit
    }

    pub(super) fn allowed_pages(&self) -> u64 {
        self.allowed.load(Relaxed)
    }

    pub(super) fn resident_pages(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    pub(super) fn peak_pages(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    pub(super) fn pinned_pages(&self) -> u64 {
        self.pinned.load(Relaxed)
    }

    /// The most pages there were above what the limit left for them.
    pub(super) fn excess_pages(&self) -> u64 {
        self.excess.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(pages: u64) -> Account {
        Account::new(Limit {
            total_bytes: Some(pages * PAGE_SIZE as u64),
            resident_bytes: None,
        })
    }

    #[test]
    fn room_is_given_up_to_the_limit() {
        let account = account(1000);
        assert!(account.reserve(1000));
        assert!(!account.reserve(1));
        assert!(account.is_below_low());
        account.reserve_beyond(3);
        assert_eq!(account.excess_pages(), 3);
        account.release(500);
        assert!(account.is_at_high() && account.has_spare(100));
        assert_eq!(
            (account.resident_pages(), account.peak_pages()),
            (503, 1003)
        );
    }

    #[test]
    fn the_pool_takes_from_what_may_be_resident() {
        let account = account(10_000);
        account.refresh(|| 4000 * PAGE_SIZE as u64);
        assert_eq!(account.allowed_pages(), 6000);
        account.refresh(|| u64::MAX);
        assert_eq!(account.allowed_pages(), LEAST_PAGES);
    }

    #[test]
    fn what_the_pool_takes_is_no_room() {
        let account = account(1000);
        assert!(account.reserve(1000));
        account.moved_out(64, || 32 * PAGE_SIZE as u64);
        assert!(!account.reserve(33) && account.reserve(32));
        // One that took room before the pool had grown, and is late to note it.
        account.note_peak(1000, 1000);
        assert_eq!(account.excess_pages(), 0);
    }

    #[test]
    fn a_relaxed_limit_is_room_and_counts_as_excess() {
        let account = account(10_000);
        assert!(account.reserve(10_000) && !account.reserve(1));
        account.relax_limit();
        account.refresh(|| 0);
        assert!(account.reserve(1000));
        assert_eq!(account.excess_pages(), 1000);
        assert!(!account.pin(10_000));
    }

    #[test]
    fn pins_leave_room_to_work_in() {
        let account = account(1000);
        assert!(!account.pin(1000));
        assert!(account.pin(800));
        assert!(!account.pin(100));
        account.unpin(800);
        assert_eq!(account.pinned_pages(), 0);
    }
}
