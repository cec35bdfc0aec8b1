//! Write protection of what a fork shares.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// The state of an address space's write protection; see `fault/cow.rs`.
#[derive(Debug, Default)]
pub struct CowProtection {
    /// What it shared with a fork's other side when it was scanned last is write-protected.
    pub write_protected: AtomicBool,
    /// The page behind those that were last allowed to be written.
    pub written_to: AtomicU64,
}
