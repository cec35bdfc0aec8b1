//! What the areas of an engine account for in common.

use memfold_sys::fork::Owner;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Held by an engine and by each of its areas.
#[derive(Debug)]
pub(super) struct Ledger {
    /// The process that the engine and its areas belong to.
    pub owner: Owner,
    /// Bytes of memory that page states take.
    state_bytes: AtomicU64,
}

impl Ledger {
    /// The ledger of an engine of this process.
    pub(super) fn new() -> Ledger {
        Ledger {
            owner: Owner::this(),
            state_bytes: AtomicU64::new(0),
        }
    }

    /// Bytes of memory that page states take.
    pub(super) fn state_bytes(&self) -> u64 {
        self.state_bytes.load(Relaxed)
    }

    /// Page states take `bytes` more.
    pub(super) fn add_state_bytes(&self, bytes: u64) {
        self.state_bytes.fetch_add(bytes, Relaxed);
    }

    /// Page states take `bytes` less.
    pub(super) fn remove_state_bytes(&self, bytes: u64) {
        self.state_bytes.fetch_sub(bytes, Relaxed);
    }
}
