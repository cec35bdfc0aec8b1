//! A swap entry: the 8 bytes that are all there is to a slot, and every change that can be made
//! to them.
//!
//! ```text
//!  63    61 60   57 56     52 51                                        0
//! [ state | age   | count   |                 location                    ]
//! ```
//!
//! A change is a compare-and-swap of the whole entry from a value that was checked. An entry that
//! is not what the change expects means that some page's data is about to be lost or mixed up
//! with another's, so the change panics, in release builds too, rather than spread it. (An idea
//! from the review of K. Song's swap table series of August 2025, as are clusters of entries.)

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

const FREE: u64 = 0;
const RESERVED: u64 = 1 << STATE_SHIFT;

/// The largest count that the entry itself holds. Small in the models, which step through each.
pub(crate) const MAX_INLINE_COUNT: u64 = if cfg!(loom) { 2 } else { 30 };
/// The count that means: the overflow table has it.
pub(crate) const OVERFLOWN: u64 = MAX_INLINE_COUNT + 1;

/// The greatest age that is told apart, in scans that the page has stayed untouched through.
pub const MAX_AGE: u8 = 15;

/// The kind of a tier: where a slot's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum TierKind {
    /// A page that repeats one word; the entry holds the word.
    SameFilled = 2,
    /// Compressed with the fast algorithm, in the pool.
    Compressed = 3,
    /// Stored as it is, in the pool, because compressing it gains nothing.
    Uncompressed = 4,
    /// Compressed again with a stronger algorithm, in the pool.
    Recompressed = 5,
    /// In a file.
    File = 6,
}

impl TierKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::SameFilled,
        Self::Compressed,
        Self::Uncompressed,
        Self::Recompressed,
        Self::File,
    ];

    /// The kind's place in [`TierKind::ALL`].
    pub const fn index(self) -> usize {
        self as usize - Self::SameFilled as usize
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
        })
    }
}

/// Where in its tier a page lies: 52 bits whose meaning is the tier's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Location(u64);

impl Location {
    /// How many bits a location has.
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

/// A value of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(u64);

impl Entry {
    fn stored(position: Position) -> Self {
        Self((position.tier as u64) << STATE_SHIFT | COUNT_ONE | position.location.0)
    }

    /// Where the page lies; `None` if the slot is free or reserved.
    pub(crate) fn position(self) -> Option<Position> {
        let tier = match self.0 >> STATE_SHIFT {
            2 => TierKind::SameFilled,
            3 => TierKind::Compressed,
            4 => TierKind::Uncompressed,
            5 => TierKind::Recompressed,
            6 => TierKind::File,
            _ => return None,
        };
        Some(Position {
            tier,
            location: Location(self.0 & LOCATION_MASK),
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

    /// Scans that the page has stayed untouched through.
    pub(crate) fn age(self) -> u8 {
        ((self.0 & AGE_MASK) >> AGE_SHIFT) as u8
    }

    /// The entry with another position: a page that is moved was not used.
    fn with_position(self, position: Position) -> Self {
        let kept = self.0 & (COUNT_MASK | AGE_MASK);
        Self((position.tier as u64) << STATE_SHIFT | kept | position.location.0)
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
    panic!("swap entry of {slot:?} is wrong while {doing}: found {found:?}");
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

    /// The entry now. What its position names may be read if the caller holds a count or a pin.
    pub(crate) fn load(&self) -> Entry {
        Entry(self.0.load(Acquire))
    }

    pub(crate) fn change(&self, from: Entry, to: Entry) -> Result<(), Entry> {
        // AcqRel: what was done to the data under the old entry happens before what is done to it
        // by whoever reads the new one.
        self.0
            .compare_exchange(from.0, to.0, AcqRel, Acquire)
            .map(drop)
            .map_err(Entry)
    }

    /// Reserves the slot if it is free. Only the holder of the slot's cluster may call this.
    pub(crate) fn reserve(&self, slot: Slot) -> bool {
        if self.0.load(Acquire) != FREE {
            return false;
        }
        // Nobody else reserves slots of this cluster, and every other change starts from an entry
        // that is not free.
        if let Err(found) = self.change(Entry(FREE), Entry(RESERVED)) {
            wrong_entry(slot, found, "reserving it");
        }
        true
    }

    /// Turns a reserved slot into a stored page with a count of 1.
    pub(crate) fn publish(&self, slot: Slot, position: Position) {
        if let Err(found) = self.change(Entry(RESERVED), Entry::stored(position)) {
            wrong_entry(slot, found, "publishing it");
        }
    }

    /// Gives a reserved slot back.
    pub(crate) fn cancel(&self, slot: Slot) {
        if let Err(found) = self.change(Entry(RESERVED), Entry(FREE)) {
            wrong_entry(slot, found, "cancelling it");
        }
    }

    /// Moves the page from one position to another under its owners. `false` if the page is no
    /// longer at `from`: nothing was changed, and the data at `to` is still the caller's.
    ///
    /// A caller that holds no count must know that nothing else can come to lie at `from`
    /// meanwhile.
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

    /// Makes the page one scan older. Returns the age that it had; a slot without a page has none.
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

    /// Notes that the slot was used. `entry` is what the user found.
    pub(crate) fn mark_used(&self, entry: Entry) {
        if entry.age() > 0 {
            // A lost race leaves the page as old as it was, which costs nothing but time.
            let _ = self.change(entry, Entry(entry.0 & !AGE_MASK));
        }
    }
}

/// Count changes that [`OverflowCounts`] makes while it holds its lock.
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

    /// The count, as far as the entry holds it.
    pub(crate) fn inline_count(&self) -> u64 {
        self.load().inline_count()
    }
}
