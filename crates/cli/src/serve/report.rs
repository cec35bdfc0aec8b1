//! What a disk did, for people and for machines.

use crate::format::bytes;
use memfold_disk::DiskUsage;
use serde::Serialize;

/// The JSON of `serve --stats`.
#[derive(Debug, Serialize)]
pub struct DiskReport {
    size_bytes: u64,
    limit_bytes: u64,
    used_bytes: u64,
    peak_bytes: u64,
    original_bytes: u64,
    stored_bytes: u64,
    same_filled_blocks: u64,
    incompressible_blocks: u64,
    file_blocks: u64,
    file_bytes: u64,
    read_bytes: u64,
    written_bytes: u64,
    discarded_bytes: u64,
    reads: u64,
    writes: u64,
    discards: u64,
    failed_reads: u64,
    failed_writes: u64,
    connections: u64,
    connections_refused: u64,
    wall_seconds: f64,
    cpu_seconds: f64,
}

/// Connections and time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    /// Clients that came.
    pub connections: u64,
    /// Clients for whom there was no room.
    pub refused: u64,
    /// Time since the start.
    pub wall_seconds: f64,
    /// CPU time of memfold.
    pub cpu_seconds: f64,
}

impl DiskReport {
    /// The report on a disk.
    pub fn new(usage: &DiskUsage, served: Served) -> DiskReport {
        DiskReport {
            size_bytes: usage.size_bytes,
            limit_bytes: usage.limit_bytes,
            used_bytes: usage.used_bytes,
            peak_bytes: usage.peak_bytes,
            original_bytes: usage.original_bytes,
            stored_bytes: usage.stored_bytes,
            same_filled_blocks: usage.same_filled_blocks,
            incompressible_blocks: usage.incompressible_blocks,
            file_blocks: usage.file_blocks,
            file_bytes: usage.file_bytes,
            read_bytes: usage.read_bytes,
            written_bytes: usage.written_bytes,
            discarded_bytes: usage.discarded_bytes,
            reads: usage.reads,
            writes: usage.writes,
            discards: usage.discards,
            failed_reads: usage.failed_reads,
            failed_writes: usage.failed_writes,
            connections: served.connections,
            connections_refused: served.refused,
            wall_seconds: served.wall_seconds,
            cpu_seconds: served.cpu_seconds,
        }
    }

    /// The same in one line.
    pub fn line(&self) -> String {
        let mut line = format!(
            "{} in use at the end, {} at the peak, of {}; {} of blocks, {} read and {} written",
            bytes(self.used_bytes),
            bytes(self.peak_bytes),
            bytes(self.limit_bytes),
            bytes(self.original_bytes),
            bytes(self.read_bytes),
            bytes(self.written_bytes),
        );
        if self.failed_writes > 0 {
            line += &format!(
                "; {} writes found no room or were refused: raise --limit, or add --swap-file",
                self.failed_writes
            );
        }
        line
    }
}
