//! Slot counts, and those too large for an entry.
//!
//! An entry counts to 30. If a page gets more owners, its count moves to this table and the entry's
//! is 31. Every change into, within and out of that state is made under the table's lock, so entry
//! and table always agree.

use std::{
    collections::HashMap,
    ops::{Deref, DerefMut},
    sync::atomic::Ordering::Relaxed,
};

use crate::{
    entry::{Entry, EntryCell, MAX_INLINE_COUNT, OVERFLOWN, Position},
    slot::Slot,
    sync::{Mutex, MutexGuard, lock},
};

/// Why a count could not be added. The slot is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CountError {
    /// The heap refused memory for a count that no longer fits the entry.
    #[error("no memory for a large slot count")]
    NoMemory,
}

/// What a release left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    /// Other counts remain.
    Counted,
    /// It was the last count: the slot is free, and the caller must free the data at the position.
    Last(Position),
}

/// Changes of a count, which may move into the overflow table and back.
impl EntryCell {
    /// Adds a count for another owner. The caller holds one.
    pub(crate) fn duplicate(
        &self,
        slot: Slot,
        overflow: &OverflowCounts,
    ) -> Result<(), CountError> {
        let mut entry = self.load();
        loop {
            let (_, count) = entry.checked(slot, "adding a count");
            if count >= MAX_INLINE_COUNT {
                return overflow.duplicate(slot, self);
            }
            match self.change(entry, entry.with_one_more()) {
                Ok(()) => return Ok(()),
                Err(found) => entry = found,
            }
        }
    }

    /// Drops the caller's count.
    pub(crate) fn release(&self, slot: Slot, overflow: &OverflowCounts) -> Released {
        let mut entry = self.load();
        loop {
            let (position, count) = entry.checked(slot, "dropping a count");
            let (next, released) = match count {
                1 => (Entry::FREE, Released::Last(position)),
                OVERFLOWN => {
                    if overflow.release(slot, self) {
                        return Released::Counted;
                    }
                    entry = self.load();
                    continue;
                }
                _ => (entry.with_one_less(), Released::Counted),
            };
            match self.change(entry, next) {
                Ok(()) => return released,
                Err(found) => entry = found,
            }
        }
    }

    /// Adds a count if the slot holds a page, for a caller that holds none.
    pub(crate) fn try_hold(&self, slot: Slot, overflow: &OverflowCounts) -> Option<Position> {
        loop {
            let entry = self.load();
            let position = entry.position()?;
            if entry.inline_count() >= MAX_INLINE_COUNT {
                if let Some(position) = overflow.try_hold(slot, self)? {
                    return Some(position);
                }
            } else if self.raise(entry) {
                return Some(position);
            }
        }
    }
}

const SHARDS: usize = 16;

/// The counts above 30, by slot.
#[derive(Debug)]
pub(crate) struct OverflowCounts {
    shards: Vec<Mutex<HashMap<u32, u64>>>,
    /// Bytes of heap of the shards, roughly. Not part of the models.
    bytes: std::sync::atomic::AtomicUsize,
}

/// A locked shard. Its memory is accounted for when it is unlocked.
struct Shard<'a> {
    counts: MutexGuard<'a, HashMap<u32, u64>>,
    capacity: usize,
    bytes: &'a std::sync::atomic::AtomicUsize,
}

/// Bytes of heap for an element of a shard, roughly.
const ELEMENT: usize = size_of::<(u32, u64)>() + 1;

impl Drop for Shard<'_> {
    fn drop(&mut self) {
        let (before, after) = (self.capacity * ELEMENT, self.counts.capacity() * ELEMENT);
        if before != after {
            self.bytes.fetch_add(after.wrapping_sub(before), Relaxed);
        }
    }
}

impl Deref for Shard<'_> {
    type Target = HashMap<u32, u64>;

    fn deref(&self) -> &Self::Target {
        &self.counts
    }
}

impl DerefMut for Shard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.counts
    }
}

impl OverflowCounts {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(HashMap::new())).collect(),
            bytes: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    fn shard(&self, slot: Slot) -> Shard<'_> {
        let counts = lock(&self.shards[slot.into_raw() as usize % SHARDS]);
        Shard {
            capacity: counts.capacity(),
            counts,
            bytes: &self.bytes,
        }
    }

    /// Adds a count to a slot whose entry was seen at its largest.
    pub(crate) fn duplicate(&self, slot: Slot, cell: &EntryCell) -> Result<(), CountError> {
        let mut shard = self.shard(slot);
        loop {
            if cell.is_overflown() {
                *shard
                    .get_mut(&slot.into_raw())
                    .unwrap_or_else(|| missing(slot)) += 1;
                return Ok(());
            }
            if cell.inline_count() < MAX_INLINE_COUNT {
                // Counts were released meanwhile.
                if cell.step_up(slot, false).is_ok() {
                    return Ok(());
                }
                continue;
            }
            shard.try_reserve(1).map_err(|_| CountError::NoMemory)?;
            if cell.step_up(slot, true).is_ok() {
                let before = shard.insert(slot.into_raw(), MAX_INLINE_COUNT + 1);
                assert!(
                    before.is_none(),
                    "{slot:?} had a large count beside a small one"
                );
                return Ok(());
            }
        }
    }

    /// Adds a count to a slot whose entry was seen at its largest. `None` if that is not possible;
    /// `Some(None)` if the count is small again.
    #[expect(
        clippy::option_option,
        reason = "failure, or a count that the caller must retry"
    )]
    pub(crate) fn try_hold(&self, slot: Slot, cell: &EntryCell) -> Option<Option<Position>> {
        let mut shard = self.shard(slot);
        shard.try_reserve(1).ok()?;
        let entry = cell.load();
        if cell.is_overflown() {
            // It stays overflown while the lock is held.
            *shard
                .get_mut(&slot.into_raw())
                .unwrap_or_else(|| missing(slot)) += 1;
            return cell.load().position().map(Some);
        }
        if entry.inline_count() == MAX_INLINE_COUNT && cell.raise(entry) {
            shard.insert(slot.into_raw(), MAX_INLINE_COUNT + 1);
            return Some(entry.position());
        }
        Some(None)
    }

    /// Drops a count of a slot whose entry was seen overflown. `false`, with nothing changed, if it
    /// no longer is.
    pub(crate) fn release(&self, slot: Slot, cell: &EntryCell) -> bool {
        let mut shard = self.shard(slot);
        if !cell.is_overflown() {
            return false;
        }
        let count = shard
            .get_mut(&slot.into_raw())
            .unwrap_or_else(|| missing(slot));
        if *count > MAX_INLINE_COUNT + 1 {
            *count -= 1;
            return true;
        }
        // The count cannot change meanwhile, only other fields of the entry.
        while cell.step_down_from_overflow(slot).is_err() {}
        shard.remove(&slot.into_raw());
        if shard.is_empty() {
            shard.shrink_to_fit();
        }
        true
    }

    /// The count of an overflown slot.
    pub(crate) fn get(&self, slot: Slot) -> Option<u64> {
        self.shard(slot).get(&slot.into_raw()).copied()
    }

    /// Bytes of heap of the table, roughly.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }
}

#[cold]
#[inline(never)]
fn missing(slot: Slot) -> ! {
    panic!("the large count of {slot:?} is missing");
}
