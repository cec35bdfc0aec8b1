//! The documents of a disk: the JSON at its end, the JSON while it is served.

use crate::format::bytes;
use memfold_disk::DiskUsage;
use serde::{Deserialize, Serialize};

/// The statistics that both documents share. Their names are an interface.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// What the disk counts.
    #[serde(flatten)]
    pub usage: DiskUsage,
    /// Clients that came.
    pub connections: u64,
    /// Clients that were disconnected for want of room.
    pub connections_refused: u64,
    /// CPU time of memfold, user and system.
    pub cpu_seconds: f64,
}

/// The document of `serve --stats`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiskReport {
    /// Seconds for which the disk was served.
    pub wall_seconds: f64,
    /// The statistics that the live document has, too.
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
    /// Seconds since it is served.
    pub uptime_seconds: f64,
    /// Clients now.
    pub connections_now: u64,
    /// The statistics that the final document has, too.
    #[serde(flatten)]
    pub statistics: DiskStatistics,
}

impl DiskStatistics {
    /// The statistics in one line, for the end.
    pub fn line(&self) -> String {
        let mut line = format!(
            "{} in use at the end, {} at the peak, of {}; {} of blocks, {} read and {} written",
            bytes(self.usage.used_bytes),
            bytes(self.usage.peak_bytes),
            bytes(self.usage.limit_bytes),
            bytes(self.usage.original_bytes),
            bytes(self.usage.read_bytes),
            bytes(self.usage.written_bytes),
        );
        if self.usage.failed_writes > 0 {
            line += &format!(
                "; {} writes found no room or were refused: raise --limit, or add --swap-file",
                self.usage.failed_writes
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
        const NAMES: [&str; 33] = [
            "wall_seconds",
            "size_bytes",
            "limit_bytes",
            "used_bytes",
            "peak_bytes",
            "original_bytes",
            "stored_bytes",
            "same_filled_blocks",
            "incompressible_blocks",
            "packed_blocks",
            "dead_bytes",
            "file_blocks",
            "file_bytes",
            "remote_blocks",
            "remote_bytes",
            "remote_blocks_out",
            "remote_blocks_in",
            "remote_retries",
            "remote_failures",
            "remote_lost_blocks",
            "remote_copies_read",
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
            statistics: DiskStatistics::default(),
        };
        let value = serde_json::to_value(&report).unwrap();
        for name in NAMES {
            assert!(value[name].is_number(), "{name}: {value}");
        }
        assert_eq!(value.as_object().unwrap().len(), NAMES.len());
    }
}
