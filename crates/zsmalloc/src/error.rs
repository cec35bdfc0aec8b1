//! Errors.

use crate::{source::SourceError, word::ObjectWord};

/// Why an object could not be stored. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// An object must have at least one byte.
    #[error("an object must have at least one byte")]
    Empty,
    /// The object is larger than the largest size class (a page).
    #[error("an object of {0} bytes is larger than a page")]
    TooLarge(usize),
    /// Every run of pages in the reserved address range is in use.
    #[error("the pool's address range is used up")]
    RangeFull,
    /// The page source refused memory.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The heap refused memory for the pool's own records.
    #[error("no memory for the pool's records")]
    Metadata,
}

/// Why [`Pool::new`](crate::Pool::new) failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NewPoolError {
    /// A value of the configuration is out of range.
    #[error("invalid pool configuration: {0}")]
    Config(&'static str),
    /// The page source refused the address range.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The heap refused memory for the pool's own records.
    #[error("no memory for the pool's records")]
    Metadata,
}

/// An object word does not name an object stored in this pool, or a read does not fit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MisuseError {
    /// The word cannot have come from this pool: no such page, class or index, or the page belongs
    /// to another class.
    #[error("object word {0} does not belong to this pool")]
    Foreign(ObjectWord),
    /// The word names a slot that holds no object: double free or use after free.
    #[error("object word {0} names no stored object (double free or use after free)")]
    NotStored(ObjectWord),
    /// A read asked for more bytes than the object's slot has.
    #[error("object word {word} names a slot shorter than {len} bytes")]
    TooLong {
        /// The word.
        word: ObjectWord,
        /// The length that was asked for.
        len: usize,
    },
}
