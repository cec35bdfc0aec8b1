//! The limit on a disk's memory, and what is reserved below it.

use crate::block_map::BlockMap;
use crate::discard::Backlog;
use memfold_swap::SwapSpace;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
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
}

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
        }
    }

    /// Most bytes in use.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Gives so many bytes to no request.
    pub(crate) fn hold_back(&self, bytes: u64) {
        self.held_back.store(bytes, Ordering::Relaxed);
    }

    /// Reserves `bytes` beside those `used` and those reserved by others, if they fit below the limit.
    pub(crate) fn reserve(&self, bytes: u64, used: impl Fn() -> u64) -> Option<Reserved<'_>> {
        let most = self.limit - self.held_back.load(Ordering::Relaxed);
        let fits = |reserved: u64| {
            let reserved = reserved.saturating_add(bytes);
            let taken = used().saturating_add(reserved);
            (taken <= most).then_some(reserved)
        };
        let taken = { &self.reserved }.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.ok().map(|_| Reserved { room: self, bytes })
    }

    fn release(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
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
}
