//! Errors.

use zsmalloc::{AllocError, NewPoolError, SourceError};

use crate::{entry::TierKind, slot::Slot};

/// Why a swap space could not be made, or a tier not be added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NewSwapSpaceError {
    /// A value of the configuration is out of range.
    #[error("invalid swap configuration: {0}")]
    Config(&'static str),
    /// The page source refused address space.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The pool could not be made.
    #[error(transparent)]
    Pool(#[from] NewPoolError),
}

impl NewSwapSpaceError {
    /// Whether a smaller capacity may do.
    pub fn is_for_want_of_addresses(&self) -> bool {
        matches!(
            self,
            Self::Source(_) | Self::Pool(NewPoolError::Source(_) | NewPoolError::Metadata)
        )
    }
}

/// Why a page could not be stored. Nothing of it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The pool has no room.
    #[error("the compressed pool has no room")]
    Pool(#[from] AllocError),
    /// The page source refused memory for a swap table.
    #[error("no memory for a swap table")]
    Table(#[from] SourceError),
    /// The heap refused memory for the space's own records.
    #[error("no memory for the swap space's records")]
    NoMemory,
    /// All slots of the space are in use.
    #[error("all swap slots are in use")]
    NoSlots,
    /// No tier accepts the page.
    #[error("no tier accepts the page")]
    NoTier,
    /// A tier failed.
    #[error("the {tier} tier failed: {reason}")]
    Tier {
        /// The tier.
        tier: TierKind,
        /// What happened.
        reason: &'static str,
    },
}

/// Why a page could not be loaded. The contents of the buffer are unspecified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The data is not what was stored. The page is lost, and its program must not go on.
    #[error("the page in swap slot {slot} is corrupt ({tier} tier: {what})")]
    Corrupt {
        /// The slot.
        slot: Slot,
        /// The tier its data lies in.
        tier: TierKind,
        /// What was wrong.
        what: Corruption,
    },
    /// The tier cannot read its data now. The page is not lost.
    #[error("the {tier} tier could not read swap slot {slot}: {reason}")]
    Tier {
        /// The slot.
        slot: Slot,
        /// The tier its data lies in.
        tier: TierKind,
        /// What happened.
        reason: &'static str,
    },
}

/// How a page was found corrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The entry names no object of the pool.
    #[error("no stored object at its location")]
    NoObject,
    /// The object belongs to another slot, or its header is damaged.
    #[error("the object is not this slot's")]
    WrongSlot,
    /// The header gives a length that the object cannot have.
    #[error("the object's length is impossible")]
    BadLength,
    /// The data is not what was encrypted for this slot.
    #[error("the data is damaged, outdated or forged")]
    Forged,
    /// A store on other machines no longer has the data.
    #[error("the store has lost it: evicted, flushed, expired, or gone with its server")]
    Lost,
    /// The compressed data does not decode to a page.
    #[error("the data does not decode")]
    Undecodable,
    /// The decoded page does not match the stored checksum.
    #[error("the checksum does not match")]
    Checksum,
}
