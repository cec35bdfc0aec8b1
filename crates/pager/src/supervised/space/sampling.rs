//! The governor's samples of a program, which decide when its mappings are scanned.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// Samples of one program's sizes. Hints: all accesses are Relaxed.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    /// Mapped pages at the last sample.
    pub mapped: AtomicU64,
    /// Resident file-backed and shared pages at the last sample.
    pub shared: AtomicU64,
    /// Mapped pages at the last scan of the mappings.
    pub mapped_at_scan: AtomicU64,
    /// The mappings are to be scanned, for example after a fault outside the managed ranges.
    pub rescan: AtomicBool,
    /// Growth of the resident pages since the last scan that the kernel served itself, so that the
    /// pages may lie in unmanaged mappings.
    pub grown_by_itself: AtomicI64,
    /// Minor faults since the last sample that are known to have broken COW or not.
    pub counted_faults: AtomicU64,
}
