//! The governor's samples of a program, which decide when its mappings are scanned.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

/// Samples of one program's sizes. Hints: all accesses are Relaxed.
#[derive(Debug, Default)]
pub(crate) struct Sampling {
    /// Mapped pages at the last sample.
    pub mapped: AtomicU64,
    /// Those that are private and writable, the arena's among them.
    pub writable: AtomicU64,
    /// Resident file-backed and shared pages at the last sample.
    pub shared: AtomicU64,
    /// Mapped pages at the last scan of the mappings.
    pub mapped_at_scan: AtomicU64,
    /// Time of the last scan of the mappings, in `Resources::milliseconds`; 0 before the first.
    pub scanned: AtomicU64,
    /// The mappings are to be scanned, for example after a fault outside the managed ranges.
    pub rescan: AtomicBool,
    /// There are more mappings, or longer names, than are read: they are scanned no more.
    pub is_unreadable: AtomicBool,
    /// Growth of the resident pages since the last scan that the kernel served itself, so that the
    /// pages may lie in unmanaged mappings.
    pub grown_by_itself: AtomicI64,
    /// Pages that are charged already, and being filled.
    pub filling: AtomicU64,
    /// Minor faults since the last sample that are known to have broken COW or not.
    pub counted_faults: AtomicU64,
}

impl Sampling {
    /// Has a forked child scanned when its parent would be: both have the same mappings, of which the same are managed.
    pub(crate) fn inherit(&self, parent: &Sampling) {
        let mapped = parent.mapped_at_scan.load(Ordering::Relaxed);
        self.mapped_at_scan.store(mapped, Ordering::Relaxed);
        let rescan = parent.rescan.load(Ordering::Relaxed);
        self.rescan.store(rescan, Ordering::Relaxed);
        let grown = parent.grown_by_itself.load(Ordering::Relaxed);
        self.grown_by_itself.store(grown, Ordering::Relaxed);
    }
}
