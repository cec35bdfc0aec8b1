//! Zspage records.

use crate::{
    geometry::PageNumber,
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
    word::ObjectWord,
};

/// The end of a list of zspages, which are linked by the number of their first page.
pub(crate) const NO_LINK: u32 = u32::MAX;

/// `next_touched` of a zspage that is not on that list.
pub(crate) const UNTOUCHED: u32 = u32::MAX - 1;

/// The class of a record that is not in service.
const NO_CLASS: u16 = u16::MAX;

pub(crate) const BITMAP_WORDS: usize = ObjectWord::MAX_OBJECTS / 64;

/// The place of a zspage in its bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the bin's list of this fullness: `used * FULLNESS_LISTS / objects`.
    Listed(u8),
    /// The current zspage of its bin.
    Current,
    /// It has no free slot, and is on no list.
    Full,
    /// A compactor is emptying it: no store uses it, and it is not retired when it is empty.
    Isolated,
    /// Out of service, or detached by a thread that is putting it in or out of service.
    Detached,
}

/// Lists by fullness of a bin's partly used zspages.
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
/// All fields are atomic, so that a stale or made-up word can be checked against any record at any
/// time without a data race. A record in service changes only under the lock of the bin that
/// `owner` and `class` name, which orders relaxed accesses. A thread that has taken the lock checks
/// `class` and then `owner` to know that it is the right one.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Zspage {
    /// A set bit is a free slot.
    free: [AtomicU64; BITMAP_WORDS],
    pub(crate) next: AtomicU32,
    pub(crate) previous: AtomicU32,
    /// Link in the list of zspages in which a bulk free freed slots, used while it holds the lock.
    pub(crate) next_touched: AtomicU32,
    /// The shard whose bin has this zspage. Changed only under the lock of the old owner's bin.
    owner: AtomicU32,
    class: AtomicU16,
    used: AtomicU16,
    place: AtomicU8,
}

impl Zspage {
    pub(crate) fn new() -> Self {
        Self {
            free: std::array::from_fn(|_| AtomicU64::new(0)),
            next: AtomicU32::new(NO_LINK),
            previous: AtomicU32::new(NO_LINK),
            next_touched: AtomicU32::new(UNTOUCHED),
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
        // Release: a thread that sees the class sees the owner.
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
        // Acquire: a free under this owner's lock sees the changes made under the previous owner's.
        self.owner.load(Ordering::Acquire) as usize
    }

    /// Hands the zspage over, after all changes under the previous owner's lock.
    pub(crate) fn set_owner(&self, shard: usize) {
        self.owner.store(shard as u32, Ordering::Release);
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
    #[inline]
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
    #[inline]
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
pub(crate) struct Link(pub(crate) u32);

impl Link {
    pub(crate) const NONE: Self = Self(NO_LINK);

    pub(crate) fn to(page: PageNumber) -> Self {
        Self(page.0)
    }

    pub(crate) fn get(self) -> Option<PageNumber> {
        (self.0 != NO_LINK).then_some(PageNumber(self.0))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
