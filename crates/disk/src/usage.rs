//! Statistics of a disk.

use std::sync::atomic::{AtomicU64, Ordering};

/// Statistics of a disk, as zram's `mm_stat` and `io_stat` have them. Counters are read one after
/// another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DiskUsage {
    /// Size of the disk.
    pub size_bytes: u64,
    /// Most bytes of memory that it may take.
    pub limit_bytes: u64,
    /// Bytes of memory that it takes: pool, tables and map.
    pub used_bytes: u64,
    /// Most bytes of memory that it has taken so far.
    pub peak_bytes: u64,
    /// Bytes of the blocks that are stored, before compression; blocks of zeros are not stored.
    pub original_bytes: u64,
    /// Bytes that the stored blocks take in the pool and the file, without overhead.
    pub stored_bytes: u64,
    /// Stored blocks that repeat one word.
    pub same_filled_blocks: u64,
    /// Stored blocks that do not compress.
    pub incompressible_blocks: u64,
    /// Stored blocks that are compressed together with neighbours.
    pub packed_blocks: u64,
    /// Bytes of the pool that blocks which are gone take beside such neighbours.
    pub dead_bytes: u64,
    /// Stored blocks that are in the file.
    pub file_blocks: u64,
    /// Bytes of the file that its blocks take.
    pub file_bytes: u64,
    /// Stored blocks that are on other machines.
    pub remote_blocks: u64,
    /// Bytes that blocks take on other machines.
    pub remote_bytes: u64,
    /// Blocks that other machines have acknowledged, so far.
    pub remote_blocks_out: u64,
    /// Blocks that came back from other machines, or from a copy in the file, so far.
    pub remote_blocks_in: u64,
    /// Requests to other machines that were repeated.
    pub remote_retries: u64,
    /// Batches that other machines did not acknowledge, whose blocks stayed, and blocks that could not be brought back.
    pub remote_failures: u64,
    /// Blocks that other machines were found to have lost.
    pub remote_lost_blocks: u64,
    /// Blocks read from their copy in the file instead of from other machines.
    pub remote_copies_read: u64,
    /// Bytes read so far.
    pub read_bytes: u64,
    /// Bytes written so far, zeros by `WRITE_ZEROES` not included.
    pub written_bytes: u64,
    /// Bytes discarded so far.
    pub discarded_bytes: u64,
    /// Requests that read, so far.
    pub reads: u64,
    /// Requests that wrote, so far.
    pub writes: u64,
    /// Requests that discarded or wrote zeros, so far.
    pub discards: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Discarded blocks that are not freed yet.
    pub discard_backlog_blocks: u64,
}

/// The statistics that are counted as they happen.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) peak_bytes: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) discarded_bytes: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) discards: AtomicU64,
    pub(crate) failed_reads: AtomicU64,
    pub(crate) failed_writes: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
