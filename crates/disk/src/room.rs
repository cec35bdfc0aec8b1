//! The limit on a disk's memory, and what is reserved below it.

use crate::block_map::BlockMap;
use crate::discard::Backlog;
use crate::sync::{self, unpoisoned};
use memfold_swap::SwapSpace;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use zsmalloc::{HugePageLimit, PageSource};

/// Bytes in use: pool, tables and map, with leaves that are not freed yet.
pub(crate) fn used_bytes<S: PageSource + 'static>(
    space: &SwapSpace<S>,
    map: &BlockMap,
    discarded: &Backlog,
) -> u64 {
    space.pool_bytes() + space.metadata_bytes() + map.bytes() + discarded.bytes()
}

/// The limit, and what is reserved below it.
#[derive(Debug)]
pub(crate) struct Room {
    limit: u64,
    /// Bytes of it that are not given.
    held_back: AtomicU64,
    reserved: AtomicU64,
    /// Threads that wait for others to release what they have reserved, and bytes that these threads have reserved
    /// themselves.
    waiters: AtomicUsize,
    held_by_waiters: Mutex<u64>,
    released: Condvar,
}

/// A waiter looks again after this time: what is in use may become less, and a reservation that is taken back wakes none.
const LOOKS_AGAIN: Duration = Duration::from_millis(100);
/// A waiter makes room itself after this time: others may hold theirs for as long as a store does not answer, and new
/// requests may take what is released.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Bytes that no other request may use. Held until they are in use or not needed.
#[derive(Debug)]
pub(crate) struct Reserved<'a> {
    room: &'a Room,
    bytes: u64,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.room.release(self.bytes);
    }
}

impl Room {
    pub(crate) fn new(limit: u64) -> Room {
        Room {
            limit,
            held_back: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            held_by_waiters: Mutex::new(0),
            released: Condvar::new(),
        }
    }

    /// Most bytes in use.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Gives `bytes` bytes to no request.
    pub(crate) fn hold_back(&self, bytes: u64) {
        self.held_back.store(bytes, Ordering::Relaxed);
    }

    /// Reserves `bytes` beside those `used` and those reserved by others, if they fit below the limit.
    pub(crate) fn reserve(&self, bytes: u64, used: impl Fn() -> u64) -> Option<Reserved<'_>> {
        let most = self.most();
        let fits = |reserved: u64| used().saturating_add(reserved) <= most;
        loop {
            let taken =
                { &self.reserved }.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |reserved| {
                    let all = reserved.saturating_add(bytes);
                    fits(all).then_some(all)
                });
            let all = taken.ok()?.saturating_add(bytes);
            // Since `used` was read, another request may have come and gone, whose bytes are in use now: what it released
            // was read, so its bytes are this time.
            if fits(all) {
                return Some(Reserved { room: self, bytes });
            }
            self.reserved.fetch_sub(bytes, Ordering::SeqCst);
        }
    }

    /// Whether `bytes` more fit below the limit now, beside those `used` and those reserved.
    pub(crate) fn fits(&self, bytes: u64, used: u64) -> bool {
        let reserved = self.reserved.load(Ordering::Relaxed);
        used.saturating_add(reserved).saturating_add(bytes) <= self.most()
    }

    /// [`reserve`](Self::reserve), which waits for a while as long as others have reserved what is lacking and do not wait themselves. `held` bytes are this
    /// thread's. `None` if room must be made.
    pub(crate) fn reserve_after_others(
        &self,
        bytes: u64,
        held: u64,
        used: impl Fn() -> u64,
    ) -> Option<Reserved<'_>> {
        let began = Instant::now();
        let mut held_by_waiters = self.lock();
        *held_by_waiters += held;
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // Others that wait see that this thread releases nothing either.
        self.released.notify_all();
        let reserved = loop {
            if let Some(reserved) = self.reserve(bytes, &used) {
                break Some(reserved);
            }
            let others = self.reserved.load(Ordering::SeqCst) > *held_by_waiters;
            let waits = others && began.elapsed() < LONGEST_WAIT;
            if !waits || used().saturating_add(bytes).saturating_add(held) > self.most() {
                break None;
            }
            let waited = self.released.wait_timeout(held_by_waiters, LOOKS_AGAIN);
            (held_by_waiters, _) = unpoisoned(waited);
        };
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        *held_by_waiters -= held;
        reserved
    }

    /// Bytes that requests may have in use and reserved.
    fn most(&self) -> u64 {
        self.limit - self.held_back.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        sync::lock(&self.held_by_waiters)
    }

    fn release(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.released.notify_all();
        }
    }
}

/// Reserves room for the huge pages of the pool: a request reserves what it stores, which may be much
/// less.
pub(crate) struct HugePages<S: PageSource> {
    pub(crate) room: Arc<Room>,
    /// The space has the pool, which has this.
    pub(crate) space: Weak<SwapSpace<S>>,
    pub(crate) map: Arc<BlockMap>,
    pub(crate) discarded: Arc<Backlog>,
}

impl<S: PageSource + 'static> HugePageLimit for HugePages<S> {
    fn reserve(&self, bytes: usize) -> bool {
        let Some(space) = self.space.upgrade() else {
            return false;
        };
        let used = || used_bytes(&space, &self.map, &self.discarded);
        let reserved = self.room.reserve(bytes as u64, used);
        // It lasts until `release`.
        reserved.map(std::mem::forget).is_some()
    }

    fn release(&self, bytes: usize) {
        self.room.release(bytes as u64);
    }
}

impl<S: PageSource> std::fmt::Debug for HugePages<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HugePages")
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_is_not_given_twice() {
        let room = Room::new(100);
        let first = room.reserve(60, || 10).expect("it fits");
        assert!(room.reserve(31, || 10).is_none());
        let second = room.reserve(30, || 10).expect("it fits exactly");
        drop(first);
        assert!(room.reserve(61, || 10).is_none());
        assert!(room.reserve(u64::MAX, || 10).is_none());
        drop(second);
        assert!(room.reserve(90, || 10).is_some());
    }

    #[test]
    fn room_that_others_release_is_waited_for() {
        let room = Room::new(100);
        let used = AtomicU64::new(10);
        let first = room.reserve(80, || used.load(Ordering::Relaxed));
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let used = || used.load(Ordering::Relaxed);
                room.reserve_after_others(60, 0, used).is_some()
            });
            std::thread::sleep(Duration::from_millis(20));
            drop(first);
            assert!(second.join().expect("a thread"));
        });
        // What others have in use by then is not waited for.
        let first = room.reserve(80, || 10);
        assert!(room.reserve_after_others(91, 0, || 10).is_none());
        drop(first);
    }

    #[test]
    fn those_that_wait_do_not_wait_for_each_other() {
        let room = Room::new(100);
        let outcomes: Vec<bool> = std::thread::scope(|scope| {
            let held = [0; 2].map(|_| room.reserve(30, || 10).expect("it fits"));
            let room = &room;
            let threads = held.map(|held| {
                scope.spawn(move || {
                    let more = room.reserve_after_others(50, 30, || 10).is_some();
                    drop(held);
                    more
                })
            });
            threads
                .map(|thread| thread.join().expect("a thread"))
                .to_vec()
        });
        assert!(
            outcomes.contains(&true),
            "room that the other released is used"
        );
    }

    #[test]
    fn what_comes_into_use_while_room_is_looked_for_counts() {
        let room = Room::new(100);
        let used = AtomicU64::new(0);
        let reads = AtomicU64::new(0);
        let slow = || {
            let found = used.load(Ordering::Relaxed);
            if reads.fetch_add(1, Ordering::Relaxed) == 0 {
                // All of another request between this read of `used` and the exchange.
                let other = room.reserve(60, || used.load(Ordering::Relaxed));
                used.store(60, Ordering::Relaxed);
                drop(other);
            }
            found
        };
        assert!(room.reserve(60, slow).is_none());
        assert!(room.reserve(40, || used.load(Ordering::Relaxed)).is_some());
    }
}
