//! Write protection of pages that a fork shares.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// The write protection of an address space, which `fault/cow.rs` maintains. Hints: all accesses are
/// Relaxed.
#[derive(Debug, Default)]
pub(crate) struct CowProtection {
    /// The managed ranges were write-protected since the last fork.
    pub write_protected: AtomicBool,
    /// The page after the last window that was unprotected, to detect sequential writers.
    pub written_to: AtomicU64,
}
