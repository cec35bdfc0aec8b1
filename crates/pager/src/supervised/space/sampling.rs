//! What the governor samples of a program to decide when its mappings are scanned.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};

/// Samples of one program's sizes. Hints: all accesses are Relaxed.
#[derive(Debug, Default)]
pub struct Sampling {
    /// Pages mapped when the kernel was asked last.
    pub mapped: AtomicU64,
    /// Pages mapped when the mappings were scanned last.
    pub mapped_at_scan: AtomicU64,
    /// A fault lay outside what is known to be managed: the mappings are to be scanned again.
    pub rescan: AtomicBool,
    /// Resident pages since the last scan that no service here brought in, so that they may lie in
    /// mappings that are not managed.
    pub grown_by_itself: AtomicI64,
    /// Faults since the governor looked of which it is known whether they broke COW.
    pub counted_faults: AtomicU64,
}
