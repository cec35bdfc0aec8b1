//! A tier that fails on demand, for tests.

use std::{fmt, sync::Arc};

use crate::{
    entry::{Location, TierKind},
    error::{Corruption, LoadError, StoreError},
    page::Page,
    scratch::Scratch,
    slot::Slot,
    sync::atomic::{AtomicU64, Ordering::*},
    tier::{Placed, Stored, Tier},
};

/// A fault of a [`FaultyTier`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A store fails; nothing is kept.
    Store,
    /// A load fails, but the page is not lost.
    Load,
    /// A load finds the page corrupt.
    Corrupt,
}

/// Pending faults, shared by a test and its [`FaultyTier`]s.
#[derive(Debug, Default)]
pub struct Faults {
    pending: [AtomicU64; 3],
    happened: AtomicU64,
}

impl Faults {
    /// No faults.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Makes the next operation of this kind fail.
    pub fn arm(&self, fault: Fault) {
        self.pending[fault as usize].fetch_add(1, Relaxed);
    }

    /// Cancels pending faults.
    pub fn disarm(&self) {
        for pending in &self.pending {
            pending.store(0, Relaxed);
        }
    }

    /// The number of faults so far.
    pub fn happened(&self) -> u64 {
        self.happened.load(Relaxed)
    }

    fn is_store_armed(&self) -> bool {
        self.pending[Fault::Store as usize].load(Relaxed) > 0
    }

    fn strikes(&self, fault: Fault) -> bool {
        let struck = self.pending[fault as usize]
            .fetch_update(Relaxed, Relaxed, |pending| pending.checked_sub(1))
            .is_ok();
        self.happened.fetch_add(struck.into(), Relaxed);
        struck
    }
}

/// A tier with injected faults.
pub struct FaultyTier {
    inner: Box<dyn Tier>,
    faults: Arc<Faults>,
}

impl FaultyTier {
    /// Wraps `inner`, which fails as `faults` demands.
    pub fn new(inner: Box<dyn Tier>, faults: Arc<Faults>) -> Self {
        Self { inner, faults }
    }

    /// Fails as a load, if one is to fail.
    fn strike_load(&self, slot: Slot) -> Result<(), LoadError> {
        let tier = self.kind();
        if self.faults.strikes(Fault::Load) {
            return Err(LoadError::Tier {
                slot,
                tier,
                reason: "injected fault",
            });
        }
        if self.faults.strikes(Fault::Corrupt) {
            return Err(LoadError::Corrupt {
                slot,
                tier,
                what: Corruption::Checksum,
            });
        }
        Ok(())
    }
}

impl fmt::Debug for FaultyTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyTier")
            .field("kind", &self.inner.kind())
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl Tier for FaultyTier {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError> {
        if self.faults.strikes(Fault::Store) {
            return Err(StoreError::Tier {
                tier: self.kind(),
                reason: "injected fault",
            });
        }
        self.inner.store(slot, page, scratch)
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.strike_load(stored.slot())?;
        self.inner.load(stored, out, scratch)
    }

    fn free(&self, locations: &mut [Location]) {
        self.inner.free(locations);
    }

    fn bytes(&self, location: Location) -> u64 {
        self.inner.bytes(location)
    }

    fn store_batch(
        &self,
        pages: &[(Slot, &Page)],
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        if self.faults.is_store_armed() {
            out.extend(
                pages
                    .iter()
                    .map(|&(slot, page)| self.store(slot, page, scratch)),
            );
        } else {
            self.inner.store_batch(pages, scratch, out);
        }
    }

    fn store_block(
        &self,
        pages: &[(Slot, &Page)],
        level: i32,
        scratch: &mut Scratch,
        out: &mut Vec<Result<Placed, StoreError>>,
    ) {
        if self.faults.is_store_armed() {
            self.store_batch(pages, scratch, out);
        } else {
            self.inner.store_block(pages, level, scratch, out);
        }
    }

    fn reads(&self, other: TierKind) -> bool {
        self.inner.reads(other)
    }

    fn may_wait(&self) -> bool {
        self.inner.may_wait()
    }

    fn load_now(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.strike_load(stored.slot())?;
        self.inner.load_now(stored, out, scratch)
    }

    fn prefetch(&self, locations: &[Location]) {
        self.inner.prefetch(locations);
    }
}
