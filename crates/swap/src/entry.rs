//! Swap entries: the 8 bytes of a slot, and all changes of them.
//!
//! ```text
//!  63    61 60   57 56     52 51                                        0
//! [ state | age   | count   |                 location                    ]
//! ```
//!
//! Pages in blocks share the state of recompressed pages and have the highest bit of the location
//! set, which no location in the pool has.
//!
//! A change is a compare-and-swap of the whole entry from a checked value. Two need none, as one thread alone may
//! change the entry then: a free one is reserved by the shard that holds its cluster, and a reserved one is published by
//! who reserved it, each after a look. An entry that is not as expected means that data of a page is about to be lost or
//! mixed up with another's, so the change panics, in release builds too, instead of spreading the damage. (An idea from
//! the review of K. Song's swap table series of August 2025, as are clusters of entries.)

use std::fmt;

use crate::{
    slot::Slot,
    sync::atomic::{AtomicU64, Ordering::*},
};

const LOCATION_BITS: u32 = 52;
const LOCATION_MASK: u64 = (1 << LOCATION_BITS) - 1;
const COUNT_ONE: u64 = 1 << LOCATION_BITS;
const COUNT_MASK: u64 = 0x1f << LOCATION_BITS;
const AGE_SHIFT: u32 = 57;
const AGE_ONE: u64 = 1 << AGE_SHIFT;
const AGE_MASK: u64 = 0xf << AGE_SHIFT;
const STATE_SHIFT: u32 = 61;
/// Tells pages in blocks from recompressed ones.
const IN_BLOCK: u64 = 1 << (LOCATION_BITS - 1);

const FREE: u64 = 0;
const RESERVED: u64 = 1 << STATE_SHIFT;

/// The largest count in an entry. Small in the models, which step through all.
pub(crate) const MAX_INLINE_COUNT: u64 = if cfg!(loom) { 2 } else { 30 };
/// The count of an entry whose count is in the overflow table.
pub(crate) const OVERFLOWN: u64 = MAX_INLINE_COUNT + 1;

/// The largest age of a page: scans since it was last stored or loaded.
pub const MAX_AGE: u8 = 15;

/// The kind of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum TierKind {
    /// A page that repeats one word, which the entry holds.
    SameFilled = 2,
    /// Compressed with the fast algorithm, in the pool.
    Compressed = 3,
    /// Stored uncompressed in the pool, because compression gains nothing.
    Uncompressed = 4,
    /// Recompressed with a stronger algorithm, in the pool.
    Recompressed = 5,
    /// In a file.
    File = 6,
    /// In a store on other machines.
    Remote = 7,
    /// Recompressed together with neighbours, as one block in the pool.
    Block = 8,
}

impl TierKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::SameFilled,
        Self::Compressed,
        Self::Uncompressed,
        Self::Recompressed,
        Self::File,
        Self::Remote,
        Self::Block,
    ];

    /// The kind's index in [`TierKind::ALL`].
    pub const fn index(self) -> usize {
        self as usize - Self::SameFilled as usize
    }

    /// The state of an entry of this kind, and what is set in its location.
    const fn state(self) -> u64 {
        match self {
            Self::Block => (Self::Recompressed as u64) << STATE_SHIFT | IN_BLOCK,
            _ => (self as u64) << STATE_SHIFT,
        }
    }
}

impl fmt::Display for TierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameFilled => "same-filled",
            Self::Compressed => "compressed",
            Self::Uncompressed => "uncompressed",
            Self::Recompressed => "recompressed",
            Self::File => "file",
            Self::Remote => "remote",
            Self::Block => "block",
        })
    }
}

/// Where in its tier a page lies: 52 bits that the tier defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Location(u64);

impl Location {
    /// Bits of a location.
    pub const BITS: u32 = LOCATION_BITS;

    /// The location with these bits.
    ///
    /// # Panics
    ///
    /// If `bits` has more than [`Location::BITS`] bits.
    pub const fn from_raw(bits: u64) -> Self {
        assert!(bits <= LOCATION_MASK, "a location has 52 bits");
        Self(bits)
    }

    /// The bits.
    pub const fn into_raw(self) -> u64 {
        self.0
    }
}

/// A tier and a location in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) tier: TierKind,
    pub(crate) location: Location,
}

impl Position {
    /// State and location as an entry has them.
    fn bits(self) -> u64 {
        let shared = matches!(self.tier, TierKind::Recompressed | TierKind::Block);
        debug_assert!(!shared || self.location.0 < IN_BLOCK);
        self.tier.state() | self.location.0
    }
}

/// A value of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(u64);

impl Entry {
    fn stored(position: Position) -> Self {
        Self(position.bits() | COUNT_ONE)
    }

    /// The page's position; `None` if the slot is free or reserved.
    pub(crate) fn position(self) -> Option<Position> {
        let location = self.0 & LOCATION_MASK;
        let tier = match self.0 >> STATE_SHIFT {
            5 if location & IN_BLOCK != 0 => {
                return Some(Position {
                    tier: TierKind::Block,
                    location: Location(location & !IN_BLOCK),
                });
            }
            2 => TierKind::SameFilled,
            3 => TierKind::Compressed,
            4 => TierKind::Uncompressed,
            5 => TierKind::Recompressed,
            6 => TierKind::File,
            7 => TierKind::Remote,
            _ => return None,
        };
        Some(Position {
            tier,
            location: Location(location),
        })
    }

    /// A free slot. Its entry is zero, as fresh memory is.
    pub(crate) const FREE: Self = Self(FREE);

    pub(crate) fn with_one_more(self) -> Self {
        Self(self.0 + COUNT_ONE)
    }

    pub(crate) fn with_one_less(self) -> Self {
        Self(self.0 - COUNT_ONE)
    }

    pub(crate) fn inline_count(self) -> u64 {
        (self.0 & COUNT_MASK) >> LOCATION_BITS
    }

    /// Scans since the page was stored or loaded.
    pub(crate) fn age(self) -> u8 {
        ((self.0 & AGE_MASK) >> AGE_SHIFT) as u8
    }

    /// The entry with another position, and its age: a migration is no access.
    fn with_position(self, position: Position) -> Self {
        let kept = self.0 & (COUNT_MASK | AGE_MASK);
        Self(position.bits() | kept)
    }

    /// The entry's position and count if it is a well-formed entry of a stored page.
    pub(crate) fn checked(self, slot: Slot, doing: &str) -> (Position, u64) {
        match (self.position(), self.inline_count()) {
            (Some(position), count @ 1..) => (position, count),
            _ => wrong_entry(slot, self, doing),
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.inline_count();
        match self.position() {
            _ if self.0 == FREE => f.write_str("free"),
            _ if self.0 == RESERVED => f.write_str("reserved"),
            Some(Position { tier, location }) => {
                write!(f, "{tier} at {:#x}, count {count}", location.0)
            }
            None => write!(f, "malformed {:#018x}", self.0),
        }
    }
}

#[cold]
#[inline(never)]
pub(crate) fn wrong_entry(slot: Slot, found: Entry, doing: &str) -> ! {
    panic!("invalid swap entry of {slot:?} while {doing}: found {found:?}");
}

/// A slot's entry in a swap table.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct EntryCell(AtomicU64);

impl EntryCell {
    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(FREE))
    }

    /// Loads the entry. The data at its position may be read while the caller holds a count or a
    /// pin.
    pub(crate) fn load(&self) -> Entry {
        Entry(self.0.load(Acquire))
    }

    pub(crate) fn change(&self, from: Entry, to: Entry) -> Result<(), Entry> {
        // AcqRel: accesses to the data under the old entry happen before those under the new one.
        self.0
            .compare_exchange(from.0, to.0, AcqRel, Acquire)
            .map(drop)
            .map_err(Entry)
    }

    /// Reserves the slot if it is free. Only the shard that holds the cluster may call this: every other change starts
    /// from an entry that is not free, so nothing changes it between the look and the store.
    pub(crate) fn reserve(&self) -> bool {
        if self.0.load(Acquire) != FREE {
            return false;
        }
        // Relaxed: a reserved entry leads to no data.
        self.0.store(RESERVED, Relaxed);
        true
    }

    /// Makes a reserved slot a stored page with a count of 1. Only who reserved it may call this, or
    /// [`cancel`](Self::cancel) it: every other change starts from the entry of a page.
    pub(crate) fn publish(&self, slot: Slot, position: Position) {
        let found = self.load();
        if found.0 != RESERVED {
            wrong_entry(slot, found, "publishing it");
        }
        // Release: what was written to the position happens before accesses by who loads the entry.
        self.0.store(Entry::stored(position).0, Release);
    }

    /// Frees a reserved slot.
    pub(crate) fn cancel(&self, slot: Slot) {
        if let Err(found) = self.change(Entry(RESERVED), Entry(FREE)) {
            wrong_entry(slot, found, "cancelling it");
        }
    }

    /// Changes the position of a page. `false`, with nothing changed, if the page is no longer at
    /// `from`; the data at `to` is still the caller's.
    ///
    /// A caller without a count must know that no other data can get the position `from` meanwhile.
    pub(crate) fn relocate(&self, from: Position, to: Position) -> bool {
        let mut entry = self.load();
        while entry.position() == Some(from) {
            match self.change(entry, entry.with_position(to)) {
                Ok(()) => return true,
                Err(found) => entry = found,
            }
        }
        false
    }

    /// Increments the page's age. Returns the previous age; `None` if the slot has no page.
    pub(crate) fn grow_older(&self) -> Option<u8> {
        let mut entry = self.load();
        loop {
            entry.position()?;
            let age = entry.age();
            if age == MAX_AGE {
                return Some(age);
            }
            match self.change(entry, Entry(entry.0 + AGE_ONE)) {
                Ok(()) => return Some(age),
                Err(found) => entry = found,
            }
        }
    }

    /// Resets the age. `entry` is what the load found.
    pub(crate) fn mark_used(&self, entry: Entry) {
        if entry.age() > 0 {
            // Losing a race keeps the old age, which is harmless.
            let _ = self.change(entry, Entry(entry.0 & !AGE_MASK));
        }
    }
}

/// Changes of a count that [`OverflowCounts`](crate::counts::OverflowCounts) makes under its lock.
impl EntryCell {
    pub(crate) fn step_up(&self, slot: Slot, to_overflow: bool) -> Result<(), Entry> {
        let entry = self.load();
        let (_, count) = entry.checked(slot, "adding a count");
        if (count == MAX_INLINE_COUNT) != to_overflow || count == OVERFLOWN {
            return Err(entry);
        }
        self.change(entry, entry.with_one_more())
    }

    pub(crate) fn step_down_from_overflow(&self, slot: Slot) -> Result<(), Entry> {
        let entry = self.load();
        let (_, count) = entry.checked(slot, "dropping a count");
        if count != OVERFLOWN {
            wrong_entry(slot, entry, "dropping an overflown count");
        }
        self.change(entry, entry.with_one_less())
    }

    /// Adds one to the count if the entry is still `entry`.
    pub(crate) fn raise(&self, entry: Entry) -> bool {
        self.change(entry, entry.with_one_more()).is_ok()
    }

    pub(crate) fn is_overflown(&self) -> bool {
        self.load().inline_count() == OVERFLOWN
    }

    /// The count in the entry.
    pub(crate) fn inline_count(&self) -> u64 {
        self.load().inline_count()
    }
}
