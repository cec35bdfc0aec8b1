//! A tier that stores nothing, to measure the cost of the rest of a swap space.

use crate::{
    entry::{Location, TierKind},
    error::{LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    tier::{Placed, Stored, Tier},
};

/// Accepts every page and drops it; a load leaves its buffer unchanged. For measurements only:
/// stored pages are lost.
#[derive(Debug)]
pub struct NoopTier(TierKind);

impl NoopTier {
    /// A tier in place of one of this kind.
    pub fn new(kind: TierKind) -> Self {
        Self(kind)
    }
}

impl Tier for NoopTier {
    fn kind(&self) -> TierKind {
        self.0
    }

    fn store(&self, slot: Slot, _: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        Ok(Placed::At(Location::from_raw(slot.into_raw().into())))
    }

    fn load(&self, _: Stored<'_>, _: &mut Page, _: &mut Scratch) -> Result<(), LoadError> {
        Ok(())
    }

    fn free(&self, _: &mut [Location]) {}

    fn bytes(&self, _: Location) -> u64 {
        0
    }
}
