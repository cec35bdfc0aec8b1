//! The documents of a run: the JSON at its end, the JSON while it runs.

use memfold_pager::{FaultLatency, Now, ProgramUsage, Stats, Totals};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The statistics that the live and the final document share. Their names are an interface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// The supervisor's counters.
    #[serde(flatten)]
    pub totals: Totals,
    /// Latency of fault service.
    pub fault_ns: FaultLatency,
    /// The part of `fault_ns` for pages in a store on other machines.
    pub remote_fault_ns: FaultLatency,
    /// The limit that was exceeded the most, by more than is tolerated; 0 if every limit was kept.
    #[serde(default)]
    pub exceeded_limit_bytes: u64,
    /// By how many bytes that limit was exceeded.
    #[serde(default)]
    pub exceeded_by_bytes: u64,
    /// CPU time of memfold's own process, user and system. The CPU time of its helper threads is the
    /// programs' own.
    pub cpu_seconds: f64,
    /// Programs seen that could not be put under the limit. Those that lived for less than about
    /// a second may have gone unseen.
    pub processes_unmanaged: u64,
    /// What only the command line knows.
    #[serde(flatten)]
    pub programs: Programs,
    /// Part of the threads' time, running or waiting for memfold, for which they waited for memfold.
    pub swapping_share: f64,
}

/// What the command line knows of the programs of a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Programs {
    /// The run's name, by `--name`.
    pub name: Option<String>,
    /// CPU time of the programs, user and system, the helper threads' included.
    pub program_cpu_seconds: f64,
    /// Largest resident memory of processes outside the limit, of samples 0.2 s to 5 s apart.
    pub peak_unmanaged_bytes: u64,
    /// The limit under which at most 5 % of the time would have gone to swapping; null where that is so.
    pub comfortable_limit_bytes: Option<u64>,
    /// The least limit that would have been held; null where the one in force is as large, where only resident memory is
    /// limited, and where there is a swap file or a store.
    pub held_limit_bytes: Option<u64>,
}

impl Statistics {
    /// Takes them from the supervisor's and from what the command line knows.
    pub fn new(
        stats: &Stats,
        cpu_seconds: f64,
        processes_unmanaged: u64,
        programs: Programs,
    ) -> Statistics {
        let waited = waited(&stats.totals).as_secs_f64();
        let time = waited + programs.program_cpu_seconds;
        Statistics {
            totals: stats.totals,
            fault_ns: stats.fault_ns,
            remote_fault_ns: stats.remote_fault_ns,
            exceeded_limit_bytes: stats.exceeded_limit_bytes,
            exceeded_by_bytes: stats.exceeded_by_bytes,
            cpu_seconds,
            processes_unmanaged,
            programs,
            swapping_share: if time > 0.0 { waited / time } else { 0.0 },
        }
    }

    /// Faults that were served.
    pub fn faults(&self) -> u64 {
        let totals = &self.totals;
        totals
            .faults_swap_in
            .saturating_add(totals.faults_zero_fill)
            .saturating_add(totals.faults_cache)
    }

    /// For how long the programs' threads waited for memfold, in sum.
    pub fn waited(&self) -> Duration {
        waited(&self.totals)
    }

    /// The limit that the user gave: in all, or of resident memory.
    pub fn limit_in_force(&self) -> (u64, LimitKind) {
        match self.totals.limit_bytes {
            0 => (self.totals.resident_limit_bytes, LimitKind::Resident),
            bytes => (bytes, LimitKind::Total),
        }
    }

    /// Whether no limit, also one that was changed since, was ever exceeded by more than is tolerated.
    pub fn is_limit_kept(&self) -> bool {
        self.exceeded_limit_bytes == 0
    }
}

fn waited(totals: &Totals) -> Duration {
    let waited = totals
        .swap_in_wait_ns
        .saturating_add(totals.first_touch_wait_ns);
    Duration::from_nanos(waited)
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// All that memfold manages.
    Total,
    /// Resident memory alone.
    Resident,
}

impl LimitKind {
    /// The option that sets such a limit.
    pub fn option(self) -> &'static str {
        match self {
            LimitKind::Total => "--limit",
            LimitKind::Resident => "--resident",
        }
    }
}

/// The document of `--stats`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The program's exit status; 128 + the signal's number if one killed it. An attached program's is its parent's to know.
    pub exit_code: Option<u8>,
    /// The signal that killed the program.
    pub signal: Option<i32>,
    /// Seconds from the program's start to the end of the last process under the limit.
    pub wall_seconds: f64,
    /// The program and its arguments.
    pub command: String,
    /// The version of memfold.
    pub memfold_version: &'static str,
    /// Whether the limit was kept, within what is tolerated.
    pub limit_kept: bool,
    /// The statistics that the live document has, too.
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// The document of a run that is going on, as `stat` and `top` read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The PID of `memfold run`.
    pub pid: u32,
    /// The program's PID.
    pub program_pid: u32,
    /// The program and its arguments, for display.
    pub command: String,
    /// Seconds since the program's start.
    pub uptime_seconds: f64,
    /// What is in use now.
    #[serde(flatten)]
    pub now: Now,
    /// What each program uses.
    pub programs: Vec<ProgramUsage>,
    /// The statistics that the final document has, too.
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// All that counts towards a limit, in bytes.
pub fn total_bytes(now: &Now) -> u64 {
    let with_pool = now.resident_bytes.saturating_add(now.pool_bytes);
    with_pool.saturating_add(now.metadata_bytes)
}

impl Snapshot {
    /// All that counts towards the limit now, in bytes.
    pub fn total_bytes(&self) -> u64 {
        total_bytes(&self.now)
    }

    /// Bytes that count towards the limit in force, and that limit: the total one, or else the resident one.
    pub fn limit(&self) -> (u64, u64) {
        if self.statistics.totals.limit_bytes > 0 {
            (self.total_bytes(), self.statistics.totals.limit_bytes)
        } else {
            (
                self.now.resident_bytes,
                self.statistics.totals.resident_limit_bytes,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> Stats {
        Stats {
            totals: Totals {
                limit_bytes: 200 << 20,
                resident_limit_bytes: 104 << 20,
                peak_resident_bytes: 104 << 20,
                peak_pool_bytes: 95 << 20,
                peak_total_bytes: 199 << 20,
                pages_out: 81_233,
                pages_in: 62_110,
                bytes_original: 2200,
                bytes_stored: 1000,
                processes: 1,
                ..Totals::default()
            },
            fault_ns: FaultLatency {
                p50: 9_000,
                p90: 15_000,
                p99: 31_234,
                max: 90_000,
            },
            ..Stats::default()
        }
    }

    #[test]
    fn the_fixed_names_are_there() {
        const NAMES: [&str; 44] = [
            "exit_code",
            "wall_seconds",
            "limit_bytes",
            "resident_limit_bytes",
            "peak_resident_bytes",
            "peak_pool_bytes",
            "peak_total_bytes",
            "peak_file_bytes",
            "peak_remote_bytes",
            "remote_pages_out",
            "remote_pages_in",
            "remote_retries",
            "remote_failures",
            "remote_lost_pages",
            "remote_copies_read",
            "peak_table_bytes",
            "peak_table_slots",
            "pages_recompressed",
            "pages_in_blocks",
            "pages_written_back",
            "file_errors",
            "faults_swap_in",
            "faults_zero_fill",
            "faults_cache",
            "pages_out",
            "pages_in",
            "pages_same_filled",
            "bytes_stored",
            "bytes_original",
            "processes",
            "over_limit_pages",
            "exceeded_limit_bytes",
            "exceeded_by_bytes",
            "longest_pause_ns",
            "cpu_seconds",
            "processes_unmanaged",
            "peak_needed_bytes",
            "peak_mapped_bytes",
            "peak_unmanaged_bytes",
            "over_limit_ns",
            "swap_in_wait_ns",
            "first_touch_wait_ns",
            "program_cpu_seconds",
            "swapping_share",
        ];
        let statistics = Statistics::new(&stats(), 0.5, 3, Programs::default());
        let report = Report {
            exit_code: Some(7),
            signal: None,
            wall_seconds: 1.5,
            command: "a b".into(),
            memfold_version: "1",
            limit_kept: statistics.is_limit_kept(),
            statistics,
        };
        let value = serde_json::to_value(&report).unwrap();
        for name in NAMES {
            assert!(value[name].is_number(), "{name}: {value}");
        }
        assert_eq!(value["fault_ns"]["p99"], 31_234);
        assert_eq!(value["fault_ns"].as_object().unwrap().len(), 4);
        assert_eq!(value["pages_out"], 81_233);
        assert_eq!(value["processes_unmanaged"], 3);
        assert_eq!(value["exit_code"], 7);
        assert_eq!(value["command"], "a b");
        assert_eq!(value["limit_kept"], true);
        for name in ["name", "comfortable_limit_bytes", "held_limit_bytes"] {
            assert!(
                value.get(name).is_some_and(serde_json::Value::is_null),
                "{name}"
            );
        }
    }

    #[test]
    fn a_snapshot_survives_the_wire() {
        let snapshot = Snapshot {
            pid: 1,
            program_pid: 2,
            command: "a 'b'".into(),
            uptime_seconds: 0.25,
            now: Now {
                resident_bytes: 3,
                pool_bytes: 4,
                metadata_bytes: 5,
                staged_bytes: 1,
                file_bytes: 6,
                ..Now::default()
            },
            programs: vec![ProgramUsage {
                pid: 2,
                resident_bytes: 3,
                staged_bytes: 1,
                pool_bytes: 4,
                file_bytes: 6,
                remote_bytes: 7,
            }],
            statistics: Statistics::new(&stats(), 0.5, 3, Programs::default()),
        };
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        assert_eq!(snapshot.limit(), (12, 200 << 20));
    }
}
