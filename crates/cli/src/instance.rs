//! What `stat` and `top` show: the runs and disks that are there.

use crate::disk_report::DiskSnapshot;
use crate::report::Snapshot;
use memfold_disk::BLOCK;
use serde::{Deserialize, Serialize};

/// A `memfold run` or a `memfold serve` that goes on. In JSON, `kind` tells which.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Instance {
    /// A run.
    Run(Box<Snapshot>),
    /// A disk.
    Disk(Box<DiskSnapshot>),
}

impl From<Snapshot> for Instance {
    fn from(run: Snapshot) -> Instance {
        Instance::Run(Box::new(run))
    }
}

impl From<DiskSnapshot> for Instance {
    fn from(disk: DiskSnapshot) -> Instance {
        Instance::Disk(Box::new(disk))
    }
}

impl Instance {
    /// memfold's PID.
    pub fn pid(&self) -> u32 {
        match self {
            Instance::Run(run) => run.pid,
            Instance::Disk(disk) => disk.pid,
        }
    }

    /// The PID that the kernel reports, in place of what the instance says.
    pub fn set_pid(&mut self, pid: u32) {
        match self {
            Instance::Run(run) => run.pid = pid,
            Instance::Disk(disk) => disk.pid = pid,
        }
    }

    /// Applies `shown` to what the instance calls itself.
    pub fn map_text(&mut self, shown: impl Fn(&str) -> String) {
        match self {
            Instance::Run(run) => {
                let name = &mut run.statistics.programs.name;
                *name = name.take().map(|name| shown(&name));
                run.command = shown(&run.command);
            }
            Instance::Disk(disk) => disk.address = shown(&disk.address),
        }
    }

    /// Whether a user means it by a PID: memfold's, or a run's program's if `trusts_program`.
    pub fn is_meant(&self, pid: u32, trusts_program: bool) -> bool {
        let is_program = match self {
            Instance::Run(run) => trusts_program && run.program_pid == pid,
            Instance::Disk(_) => false,
        };
        self.pid() == pid || is_program
    }

    /// Bytes in use, and the limit in force.
    pub fn limit(&self) -> (u64, u64) {
        match self {
            Instance::Run(run) => run.limit(),
            Instance::Disk(disk) => (
                disk.statistics.usage.used_bytes,
                disk.statistics.usage.limit_bytes,
            ),
        }
    }

    /// Since it started.
    pub fn uptime_seconds(&self) -> f64 {
        match self {
            Instance::Run(run) => run.uptime_seconds,
            Instance::Disk(disk) => disk.uptime_seconds,
        }
    }

    /// Pages that left a run's programs so far; blocks written to a disk.
    pub fn pages_out(&self) -> u64 {
        match self {
            Instance::Run(run) => run.statistics.totals.pages_out,
            Instance::Disk(disk) => disk.statistics.usage.written_bytes / BLOCK,
        }
    }

    /// Pages that came back so far; blocks read from a disk.
    pub fn pages_in(&self) -> u64 {
        match self {
            Instance::Run(run) => run.statistics.totals.pages_in,
            Instance::Disk(disk) => disk.statistics.usage.read_bytes / BLOCK,
        }
    }

    /// A run's name or command; a disk's address.
    pub fn title(&self) -> String {
        match self {
            Instance::Run(run) => {
                let name = run.statistics.programs.name.as_deref();
                name.unwrap_or(&run.command).to_owned()
            }
            Instance::Disk(disk) => format!("disk {}", disk.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_report::DiskStatistics;
    use memfold_disk::DiskUsage;

    #[test]
    fn a_disk_survives_the_wire_and_says_what_it_is() {
        let mut usage = DiskUsage::default();
        usage.used_bytes = 3;
        usage.limit_bytes = 9;
        usage.written_bytes = 8192;
        let disk = DiskSnapshot {
            pid: 7,
            address: "nbd+unix:///?socket=/run/disk.sock".into(),
            uptime_seconds: 1.5,
            connections_now: 1,
            statistics: DiskStatistics {
                usage,
                cpu_seconds: 0.25,
                ..DiskStatistics::default()
            },
        };
        let disk = Instance::from(disk);
        let value = serde_json::to_value(&disk).unwrap();
        assert_eq!(
            (&value["kind"], &value["used_bytes"]),
            (&"disk".into(), &3.into())
        );
        let text = value.to_string();
        assert_eq!(serde_json::from_str::<Instance>(&text).unwrap(), disk);
        assert_eq!((disk.limit(), disk.pages_out()), ((3, 9), 2));
        assert!(disk.is_meant(7, true) && !disk.is_meant(0, true));
        assert!(serde_json::from_str::<Instance>("{\"kind\":\"disk\",\"pid\":1}").is_err());
    }
}
