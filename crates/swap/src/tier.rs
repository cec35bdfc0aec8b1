//! Tiers: storage for the data of slots.
//!
//! A tier is an implementation of [`Tier`]. The space offers a new page to its tiers in order until
//! one accepts it, and records tier and location in the slot's entry; owners of slots see neither.

mod block;
mod block_records;
mod cipher;
mod compressed;
#[cfg(feature = "testing")]
mod fault;
mod file;
#[cfg(feature = "testing")]
mod noop;
mod record;
mod remote;
mod same_filled;
mod uncompressed;

pub use cipher::TierKey;
#[cfg(feature = "testing")]
pub use fault::{Fault, Faults, FaultyTier};
pub use file::{FileBackend, FileTier, FileUsage};
#[cfg(feature = "testing")]
pub use noop::NoopTier;
#[cfg(feature = "testing")]
pub use remote::model::{ModelFault, ModelStore};
pub use remote::{
    Batch, BatchId, Place, RemoteBackend, RemoteConfig, RemoteError, RemoteTier, RemoteUsage,
    Removal,
};

pub(crate) use block::BlockTier;
pub(crate) use compressed::{CompressedTier, slot_of};
pub(crate) use same_filled::SameFilledTier;
pub(crate) use uncompressed::UncompressedTier;

use std::{fmt, sync::Arc};

use crate::{
    entry::{Location, TierKind},
    error::{LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    sync::atomic::{AtomicU64, Ordering},
};

/// The outcome of offering a page to a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// The tier does not accept it; the next one is tried.
    Declined,
    /// The page is stored here.
    At(Location),
    /// The page is stored here, and the space must keep one more word in the slot's annex. The
    /// location must tell that there is one.
    WithAnnex(Location, u64),
}

/// A stored page.
#[derive(Clone, Copy)]
pub struct Stored<'a> {
    slot: Slot,
    location: Location,
    annex: &'a AtomicU64,
}

impl<'a> Stored<'a> {
    /// A page that a tier stores for `slot` at `location`, and its annex word if the tier asked for
    /// one. For users of a tier without a space.
    pub fn new(slot: Slot, location: Location, annex: &'a AtomicU64) -> Self {
        Self {
            slot,
            location,
            annex,
        }
    }

    /// The slot it was stored for.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Its location in the tier.
    pub fn location(&self) -> Location {
        self.location
    }

    /// The annex word. Unspecified if the tier did not ask for one.
    pub fn annex(&self) -> u64 {
        self.annex.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Stored<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stored")
            .field("slot", &self.slot)
            .field("location", &self.location)
            .finish_non_exhaustive()
    }
}

/// Storage for pages. All methods may be called from many threads at once.
pub trait Tier: Send + Sync {
    /// The kind of the tier. A space has at most one of each.
    fn kind(&self) -> TierKind;

    /// Stores a copy of `page` for `slot`, or declines it. The caller may then drop its own copy.
    ///
    /// # Errors
    ///
    /// If the tier accepts the page but cannot store it now. Nothing of it is kept.
    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError>;

    /// Copies a stored page to `out`, after verifying it.
    ///
    /// # Errors
    ///
    /// If the data is not what was stored, or cannot be read now. The contents of `out` are
    /// unspecified then.
    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError>;

    /// Frees the pages at these locations, each given once. The slice may be reordered.
    ///
    /// # Panics
    ///
    /// If the tier stores nothing at one of them: an entry was invalid.
    fn free(&self, locations: &mut [Location]);

    /// Bytes of storage of the page at `location`.
    fn bytes(&self, location: Location) -> u64;

    /// Bytes of memory that the tier takes to know what it has where. Loads a few counters.
    fn metadata_bytes(&self) -> u64 {
        0
    }

    /// Stores several pages, and appends the outcome of each to `out`, in order. To be overridden
    /// where one large write is cheaper than many small ones.
    fn store_batch(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        out.extend(
            pages
                .iter()
                .map(|&(slot, page)| self.store(slot, page, scratch)),
        );
    }

    /// Stores several pages as one block, compressed at a Zstandard `level`, or declines them all; appends the outcome of
    /// each to `out`, in order. To be overridden where there are blocks.
    fn store_block(
        &self,
        pages: &[(Slot, &Page)],
        level: i32,
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        let _ = (level, scratch);
        out.extend(pages.iter().map(|_| Ok(Placed::Declined)));
    }

    /// Whether this tier can load and free data of the `other` kind of tier in place.
    fn reads(&self, other: TierKind) -> bool {
        let _ = other;
        false
    }

    /// Whether a load may wait for long. Such a tier never reuses a location: a load of a freed one
    /// fails, and never returns other data. So nothing that frees waits for its loads.
    fn may_wait(&self) -> bool {
        false
    }

    /// Loads a page as [`load`](Self::load) does, or fails where that would wait.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    fn load_now(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.load(stored, out, scratch)
    }

    /// Begins to load pages that are about to be loaded one after the other. To be overridden where
    /// many are fetched together sooner than one by one.
    fn prefetch(&self, locations: &[Location]) {
        let _ = locations;
    }
}

/// Stores one page in a tier that stores batches.
pub(crate) fn store_one(
    tier: &impl Tier,
    slot: Slot,
    page: &Page,
    scratch: &mut Scratch,
) -> Result<Placed, StoreError> {
    let mut out = Vec::with_capacity(1);
    tier.store_batch(&[(slot, page)], scratch, &mut out);
    out.pop().unwrap_or(Err(StoreError::Tier {
        tier: tier.kind(),
        reason: "no outcome",
    }))
}

/// A shared tier.
impl<T: Tier + ?Sized> Tier for Arc<T> {
    fn kind(&self) -> TierKind {
        (**self).kind()
    }

    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError> {
        (**self).store(slot, page, scratch)
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        (**self).load(stored, out, scratch)
    }

    fn free(&self, locations: &mut [Location]) {
        (**self).free(locations);
    }

    fn bytes(&self, location: Location) -> u64 {
        (**self).bytes(location)
    }

    fn metadata_bytes(&self) -> u64 {
        (**self).metadata_bytes()
    }

    fn store_batch(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        (**self).store_batch(pages, scratch, out);
    }

    fn store_block(
        &self,
        pages: &[(Slot, &Page)],
        level: i32,
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        (**self).store_block(pages, level, scratch, out);
    }

    fn reads(&self, other: TierKind) -> bool {
        (**self).reads(other)
    }

    fn may_wait(&self) -> bool {
        (**self).may_wait()
    }

    fn load_now(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        (**self).load_now(stored, out, scratch)
    }

    fn prefetch(&self, locations: &[Location]) {
        (**self).prefetch(locations);
    }
}
