//! The object word: an object's address in 50 bits.

use std::{fmt, num::NonZeroU64};

use crate::geometry::PageNumber;

const INDEX_BITS: u32 = 8;
const PAGE_BITS: u32 = 32;
const CLASS_BITS: u32 = 10;

/// Names one stored object: `[class + 1 : 10 | first page of its zspage : 32 | index : 8]`.
///
/// A word is never zero and takes [`ObjectWord::BITS`] bits, so owners can pack it with bits of
/// their own. As it contains the class, a free finds the lock it needs without reading shared
/// memory first (an idea from W. Hao's zsmalloc series of April 2026), and
/// [`Pool::free_bulk`](crate::Pool::free_bulk) can sort words by it.
///
/// The length of the object is not in the word: the owner keeps it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ObjectWord(NonZeroU64);

impl ObjectWord {
    /// The number of low bits that [`ObjectWord::into_raw`] can set.
    pub const BITS: u32 = CLASS_BITS + PAGE_BITS + INDEX_BITS;

    /// The most size classes.
    pub(crate) const MAX_CLASSES: usize = (1 << CLASS_BITS) - 1;

    /// The most objects of a zspage.
    pub(crate) const MAX_OBJECTS: usize = 1 << INDEX_BITS;

    /// Initial value of arrays of words.
    pub(crate) const PLACEHOLDER: Self = Self(NonZeroU64::MIN);

    pub(crate) fn new(class: usize, page: PageNumber, index: usize) -> Self {
        debug_assert!(class < Self::MAX_CLASSES && index < Self::MAX_OBJECTS);
        let raw = ((class as u64 + 1) << (PAGE_BITS + INDEX_BITS))
            | (u64::from(page.0) << INDEX_BITS)
            | index as u64;
        Self(NonZeroU64::new(raw).expect("the class field is at least one"))
    }

    /// The word as a number, for the owner to keep.
    pub fn into_raw(self) -> u64 {
        self.0.get()
    }

    /// The word of a number from [`ObjectWord::into_raw`]; `None` if `raw` cannot be a word.
    ///
    /// A pool checks that a word names a stored object. A number that no store has returned may name an object that
    /// another thread is storing or freeing: to read that is a data race.
    pub fn from_raw(raw: u64) -> Option<Self> {
        let class = raw >> (PAGE_BITS + INDEX_BITS);
        if class == 0 || class >> CLASS_BITS != 0 {
            return None;
        }
        NonZeroU64::new(raw).map(Self)
    }

    pub(crate) fn class(self) -> usize {
        (self.into_raw() >> (PAGE_BITS + INDEX_BITS)) as usize - 1
    }

    pub(crate) fn page(self) -> PageNumber {
        PageNumber((self.into_raw() >> INDEX_BITS) as u32)
    }

    /// Whether both words name objects of the same zspage.
    pub(crate) fn is_beside(self, other: Self) -> bool {
        (self.into_raw() ^ other.into_raw()) >> INDEX_BITS == 0
    }

    pub(crate) fn index(self) -> usize {
        (self.into_raw() & (Self::MAX_OBJECTS as u64 - 1)) as usize
    }
}

impl fmt::Debug for ObjectWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ObjectWord(class {}, page {}, index {})",
            self.class(),
            self.page().0,
            self.index()
        )
    }
}

impl fmt::Display for ObjectWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.into_raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_survive() {
        for class in [0, 1, 255, ObjectWord::MAX_CLASSES - 1] {
            for page in [0, 1, u32::MAX] {
                for index in [0, 1, 255] {
                    let word = ObjectWord::new(class, PageNumber(page), index);
                    assert_eq!(
                        (word.class(), word.page().0, word.index()),
                        (class, page, index)
                    );
                    assert_eq!(ObjectWord::from_raw(word.into_raw()), Some(word));
                    assert!(word.into_raw() < 1 << ObjectWord::BITS);
                }
            }
        }
    }

    #[test]
    fn impossible_words_are_refused() {
        for raw in [0, 1, (1 << 40) - 1, 1 << 50, u64::MAX] {
            assert_eq!(ObjectWord::from_raw(raw), None);
        }
    }
}
