//! The documents of a disk: the JSON at its end, the JSON while it is served.

use crate::format::bytes;
use memfold_disk::DiskUsage;
use serde::{Deserialize, Serialize};

/// The statistics that both documents share. Their names are an interface.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// Size of the disk.
    pub size_bytes: u64,
    /// Most bytes of memory that it may take.
    pub limit_bytes: u64,
    /// Bytes of memory that it takes: pool, tables and map.
    pub used_bytes: u64,
    /// The most so far.
    pub peak_bytes: u64,
    /// Blocks that are stored, before compression.
    pub original_bytes: u64,
    /// What they take in the pool and the file, without overhead.
    pub stored_bytes: u64,
    /// Stored blocks that repeat one word.
    pub same_filled_blocks: u64,
    /// Stored blocks that do not compress.
    pub incompressible_blocks: u64,
    /// Stored blocks that are in the file.
    pub file_blocks: u64,
    /// What they take there.
    pub file_bytes: u64,
    /// Stored blocks that are on other machines.
    pub remote_blocks: u64,
    /// What they take there.
    pub remote_bytes: u64,
    /// Discarded blocks that are not freed yet.
    pub discard_backlog_blocks: u64,
    /// Read so far.
    pub read_bytes: u64,
    /// Written so far.
    pub written_bytes: u64,
    /// Discarded so far.
    pub discarded_bytes: u64,
    /// Requests that read, so far.
    pub reads: u64,
    /// Requests that wrote, so far.
    pub writes: u64,
    /// Requests that discarded or wrote zeros, so far.
    pub discards: u64,
    /// Reads of blocks that did not verify, or beyond the end.
    pub failed_reads: u64,
    /// Writes without room or beyond the end.
    pub failed_writes: u64,
    /// Clients that came.
    pub connections: u64,
    /// Clients that were hung up on for want of room.
    pub connections_refused: u64,
    /// CPU time of memfold, user and system.
    pub cpu_seconds: f64,
}

/// The document of `serve --stats`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiskReport {
    /// How long it was served.
    pub wall_seconds: f64,
    /// The rest.
    #[serde(flatten)]
    pub statistics: DiskStatistics,
}

/// The document of a disk that is being served, as `stat` and `top` read it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DiskSnapshot {
    /// The PID of `memfold serve`.
    pub pid: u32,
    /// Where clients connect, as an NBD URI.
    pub address: String,
    /// Since it listens.
    pub uptime_seconds: f64,
    /// Clients now.
    pub connections_now: u64,
    /// The rest.
    #[serde(flatten)]
    pub statistics: DiskStatistics,
}

/// Connections and time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    /// Clients that came.
    pub connections: u64,
    /// Clients for whom there was no room.
    pub refused: u64,
    /// CPU time of memfold.
    pub cpu_seconds: f64,
}

impl DiskStatistics {
    /// The statistics of a disk.
    pub fn new(usage: &DiskUsage, served: Served) -> DiskStatistics {
        DiskStatistics {
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
            remote_blocks: usage.remote_blocks,
            remote_bytes: usage.remote_bytes,
            discard_backlog_blocks: usage.discard_backlog_blocks,
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
            cpu_seconds: served.cpu_seconds,
        }
    }

    /// The same in one line, for the end.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_names_are_there() {
        const NAMES: [&str; 25] = [
            "wall_seconds",
            "size_bytes",
            "limit_bytes",
            "used_bytes",
            "peak_bytes",
            "original_bytes",
            "stored_bytes",
            "same_filled_blocks",
            "incompressible_blocks",
            "file_blocks",
            "file_bytes",
            "remote_blocks",
            "remote_bytes",
            "discard_backlog_blocks",
            "read_bytes",
            "written_bytes",
            "discarded_bytes",
            "reads",
            "writes",
            "discards",
            "failed_reads",
            "failed_writes",
            "connections",
            "connections_refused",
            "cpu_seconds",
        ];
        let report = DiskReport {
            wall_seconds: 1.5,
            statistics: DiskStatistics::new(&DiskUsage::default(), Served::default()),
        };
        let value = serde_json::to_value(&report).unwrap();
        for name in NAMES {
            assert!(value[name].is_number(), "{name}: {value}");
        }
        assert_eq!(value.as_object().unwrap().len(), NAMES.len());
    }
}
