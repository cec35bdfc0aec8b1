//! Incompressible pages.
//!
//! A page fills an object of the largest size class, so its checksum goes to the slot's annex.

use std::sync::Arc;

use zsmalloc::{PageSource, Pool};

use crate::{
    PAGE_SIZE,
    checksum::Checksums,
    entry::{Location, TierKind},
    error::{Corruption, LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    tier::{
        Placed, Stored, Tier,
        compressed::{free_objects, object_at, object_bytes},
    },
};

/// Pages stored uncompressed in the pool.
#[derive(Debug)]
pub(crate) struct UncompressedTier<S: PageSource> {
    checksums: Checksums,
    pool: Arc<Pool<S>>,
}

impl<S: PageSource> UncompressedTier<S> {
    pub(crate) fn new(checksums: Checksums, pool: Arc<Pool<S>>) -> Self {
        Self { checksums, pool }
    }
}

impl<S: PageSource> Tier for UncompressedTier<S> {
    fn kind(&self) -> TierKind {
        TierKind::Uncompressed
    }

    fn store(&self, slot: Slot, page: &Page, _: &mut Scratch) -> Result<Placed, StoreError> {
        let checksum = self.checksums.seal(slot, page);
        let word = self.pool.store(&[page])?;
        Ok(Placed::WithAnnex(
            Location::from_raw(word.into_raw()),
            checksum.into(),
        ))
    }

    fn load(&self, stored: Stored<'_>, out: &mut Page, _: &mut Scratch) -> Result<(), LoadError> {
        let slot = stored.slot();
        let corrupt = |what| LoadError::Corrupt {
            slot,
            tier: self.kind(),
            what,
        };
        let word = object_at(stored.location()).ok_or(corrupt(Corruption::NoObject))?;
        self.pool
            .try_read_slot(word, |object| match object.first_chunk::<PAGE_SIZE>() {
                Some(page) => {
                    *out = *page;
                    Ok(())
                }
                None => Err(Corruption::BadLength),
            })
            .unwrap_or(Err(Corruption::NoObject))
            .map_err(corrupt)?;
        self.checksums
            .verify(slot, out, stored.annex() as u32)
            .map_err(corrupt)
    }

    fn free(&self, locations: &mut [Location]) {
        free_objects(&self.pool, locations);
    }

    fn bytes(&self, location: Location) -> u64 {
        object_bytes(&self.pool, location)
    }
}
