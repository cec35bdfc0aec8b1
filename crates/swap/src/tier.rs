//! Tiers: where the data of slots lies.
//!
//! A tier is one implementation of [`Tier`] in a file of its own. The space offers a new page to
//! its tiers in order until one takes it, and keeps in the slot's entry which one did and where;
//! owners of slots see none of that.

mod compressed;
#[cfg(feature = "testing")]
mod fault;
mod file;
#[cfg(feature = "testing")]
mod noop;
mod same_filled;
mod uncompressed;

#[cfg(feature = "testing")]
pub use fault::{Fault, Faults, FaultyTier};
pub use file::{FileBackend, FileKey, FileTier, FileUsage};
#[cfg(feature = "testing")]
pub use noop::NoopTier;

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

/// What became of a page that was offered to a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// It is not for this tier; the next is asked.
    Declined,
    /// The tier keeps it here.
    At(Location),
    /// The tier keeps it here, and the space is to keep one word more in the slot's annex. The
    /// location must tell that there is one.
    WithAnnex(Location, u64),
}

/// A page that a tier keeps.
#[derive(Clone, Copy)]
pub struct Stored<'a> {
    slot: Slot,
    location: Location,
    annex: &'a AtomicU64,
}

impl<'a> Stored<'a> {
    /// A page that a tier keeps for `slot` at `location`, and the annex word if it asked for one.
    /// For those who keep pages in a tier without a space.
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

    /// Where the tier said it is.
    pub fn location(&self) -> Location {
        self.location
    }

    /// The word that the tier asked to be kept in the annex. Means nothing if it did not.
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

/// A place for pages. All methods may be called from many threads at once.
pub trait Tier: Send + Sync {
    /// What kind of tier this is. A space has at most one of each.
    fn kind(&self) -> TierKind;

    /// Keeps a copy of `page` for `slot`, or declines it. When it returns, the page is safe there:
    /// the caller may drop its own.
    ///
    /// # Errors
    ///
    /// If the page is for this tier but cannot be kept now. Nothing is kept then.
    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError>;

    /// Copies a page that the tier keeps to `out`, after checking that it is what was stored.
    ///
    /// # Errors
    ///
    /// If it is not, or cannot be read now. `out` then holds anything.
    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError>;

    /// Forgets the pages at these locations, each given once. The slice may be reordered.
    ///
    /// # Panics
    ///
    /// If the tier keeps nothing at one of them: an entry was wrong.
    fn free(&self, locations: &mut [Location]);

    /// Bytes of storage that the page at `location` takes.
    fn bytes(&self, location: Location) -> u64;

    /// Keeps copies of several pages, and adds what became of each to `out`, in order. A tier for
    /// which one large write is cheaper than many small ones does better than store them one by
    /// one.
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

    /// Whether this tier could load and free what the `other` kind of tier keeps, where it is.
    fn reads(&self, other: TierKind) -> bool {
        let _ = other;
        false
    }
}

/// A tier that somebody else looks at too.
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

    fn store_batch(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        (**self).store_batch(pages, scratch, out);
    }

    fn reads(&self, other: TierKind) -> bool {
        (**self).reads(other)
    }
}
