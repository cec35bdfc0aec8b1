//! What an engine counts.

use super::config::Mode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Figures of an engine. Counters are exact, and count from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddedStats {
    /// How faults are served.
    pub mode: Mode,
    /// The limit on everything, in bytes; 0 where only the resident limit is set.
    pub limit_bytes: u64,
    /// How many bytes may be resident now: what pool and records leave.
    pub resident_limit_bytes: u64,
    /// Bytes of regions that are resident now, those on their way out included.
    pub resident_bytes: u64,
    /// The most there ever were.
    pub peak_resident_bytes: u64,
    /// Bytes of memory that the compressed pool takes now.
    pub pool_bytes: u64,
    /// Bytes of memory for swap tables and page states now.
    pub metadata_bytes: u64,
    /// Bytes of all regions.
    pub mapped_bytes: u64,
    /// Bytes that are pinned.
    pub pinned_bytes: u64,
    /// Pages that are stored now.
    pub stored_pages: u64,
    /// Those of them that repeat one word and take no room.
    pub same_filled_pages: u64,
    /// Bytes that the stored pages take in the pool.
    pub stored_bytes: u64,
    /// Faults that brought pages back from the pool.
    pub faults_swap_in: u64,
    /// First touches that faulted.
    pub faults_zero_fill: u64,
    /// Faults on pages that were not stored yet.
    pub faults_cache: u64,
    /// Pages stored.
    pub pages_out: u64,
    /// Pages brought back from the pool, by faults, advice and readahead.
    pub pages_in: u64,
    /// Those of them that were brought by the readahead thread, or around scattered faults.
    pub pages_read_ahead: u64,
    /// Pages filled with zeros.
    pub pages_zero_filled: u64,
    /// Times that a faulting thread had to make room itself.
    pub direct_reclaims: u64,
    /// Pages that could not be stored, and stayed.
    pub store_failures: u64,
    /// The most pages that there ever were above what the limit left for them: nothing could be moved
    /// out, or nothing was gained by it.
    pub over_limit_pages: u64,
}

/// The counters.
#[derive(Debug, Default)]
pub struct Counters {
    pub faults_swap_in: AtomicU64,
    pub faults_zero_fill: AtomicU64,
    pub faults_cache: AtomicU64,
    pub pages_in: AtomicU64,
    pub pages_out: AtomicU64,
    pub pages_read_ahead: AtomicU64,
    pub pages_zero_filled: AtomicU64,
    pub direct_reclaims: AtomicU64,
    pub store_failures: AtomicU64,
}

/// Adds to a counter.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}
