//! The documents of a run: the JSON at its end, the JSON while it runs, the summary line.

use crate::format::{bytes, grouped, nanoseconds, ratio};
use memfold_pager::{FaultLatency, Now, ProgramUsage, Stats, Totals};
use serde::{Deserialize, Serialize};

/// The statistics that the live and the final document share. Their names are an interface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Those of the supervisor.
    #[serde(flatten)]
    pub totals: Totals,
    /// Latency of fault service.
    pub fault_ns: FaultLatency,
    /// CPU time of memfold's own process, user and system. The CPU time of its helper threads is the
    /// programs' own.
    pub cpu_seconds: f64,
    /// Programs seen that could not be put under the limit. Those that lived for less than about
    /// a second may have gone unseen.
    pub processes_unmanaged: u64,
}

impl Statistics {
    /// Takes them from the supervisor's.
    pub fn new(stats: &Stats, cpu_seconds: f64, processes_unmanaged: u64) -> Statistics {
        Statistics {
            totals: stats.totals,
            fault_ns: stats.fault_ns,
            cpu_seconds,
            processes_unmanaged,
        }
    }
}

/// The document of `--stats`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The program's exit status; 128 + the signal's number if one killed it.
    pub exit_code: i32,
    /// The signal that killed the program.
    pub signal: Option<i32>,
    /// From the program's start to the end of the last process under the limit.
    pub wall_seconds: f64,
    /// The rest.
    #[serde(flatten)]
    pub statistics: Statistics,
}

/// The document of a run that is going on, as `stat` and `top` read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The PID of `memfold run`.
    pub pid: u32,
    /// The program's.
    pub program_pid: u32,
    /// The program and its arguments, for display.
    pub command: String,
    /// Since the program's start.
    pub uptime_seconds: f64,
    /// What is in use now.
    #[serde(flatten)]
    pub now: Now,
    /// What each program uses.
    pub programs: Vec<ProgramUsage>,
    /// The rest.
    #[serde(flatten)]
    pub statistics: Statistics,
}

impl Snapshot {
    /// All that counts towards the limit now, in bytes.
    pub fn total_bytes(&self) -> u64 {
        let with_pool = self.now.resident_bytes.saturating_add(self.now.pool_bytes);
        with_pool.saturating_add(self.now.metadata_bytes)
    }

    /// What is in force: the total limit, or else the resident one.
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

/// One line about a run in which memfold had something to do; none where it had not.
pub fn summary(program: &str, statistics: &Statistics) -> Option<String> {
    if statistics.totals.pages_out == 0 {
        return None;
    }
    let (peak, limit, what) = if statistics.totals.limit_bytes > 0 {
        (
            statistics.totals.peak_total_bytes,
            statistics.totals.limit_bytes,
            "",
        )
    } else {
        (
            statistics.totals.peak_resident_bytes,
            statistics.totals.resident_limit_bytes,
            " resident",
        )
    };
    let packed = ratio(
        statistics.totals.bytes_original,
        statistics.totals.bytes_stored,
    )
    .map(|ratio| format!(", {ratio}"))
    .unwrap_or_default();
    let file = if statistics.totals.peak_file_bytes > 0 {
        format!(", file {}", bytes(statistics.totals.peak_file_bytes))
    } else {
        String::new()
    };
    let over = if statistics.totals.over_limit_pages > 0 {
        format!(
            "; {} pages over the limit at worst",
            grouped(statistics.totals.over_limit_pages)
        )
    } else {
        String::new()
    };
    Some(format!(
        "held {program} in {} of {}{what} (pool {}{packed}{file}); {} pages out, {} in, \
         p99 fault {}{over}",
        bytes(peak),
        bytes(limit),
        bytes(statistics.totals.peak_pool_bytes),
        grouped(statistics.totals.pages_out),
        grouped(statistics.totals.pages_in),
        nanoseconds(statistics.fault_ns.p99),
    ))
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
    fn the_summary_has_the_main_numbers() {
        let mut statistics = Statistics::new(&stats(), 0.5, 0);
        assert_eq!(
            summary("redis-server", &statistics).unwrap(),
            "held redis-server in 199 MiB of 200 MiB (pool 95.0 MiB, 2.2:1); \
             81,233 pages out, 62,110 in, p99 fault 31 µs"
        );
        statistics.totals.over_limit_pages = 1500;
        statistics.totals.peak_file_bytes = 3 << 20;
        statistics.totals.limit_bytes = 0;
        assert_eq!(
            summary("redis-server", &statistics).unwrap(),
            "held redis-server in 104 MiB of 104 MiB resident (pool 95.0 MiB, 2.2:1, \
             file 3.0 MiB); \
             81,233 pages out, 62,110 in, p99 fault 31 µs; 1,500 pages over the limit at worst"
        );
    }

    #[test]
    fn without_reclaim_there_is_no_summary() {
        assert_eq!(
            summary("true", &Statistics::new(&Stats::default(), 0.0, 0)),
            None
        );
    }

    #[test]
    fn the_fixed_names_are_there() {
        const NAMES: [&str; 26] = [
            "exit_code",
            "wall_seconds",
            "limit_bytes",
            "resident_limit_bytes",
            "peak_resident_bytes",
            "peak_pool_bytes",
            "peak_total_bytes",
            "peak_file_bytes",
            "peak_table_bytes",
            "peak_table_slots",
            "pages_recompressed",
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
            "longest_pause_ns",
            "cpu_seconds",
            "processes_unmanaged",
        ];
        let statistics = Statistics::new(&stats(), 0.5, 3);
        let report = Report {
            exit_code: 7,
            signal: None,
            wall_seconds: 1.5,
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
                processes_now: 1,
            },
            programs: vec![ProgramUsage {
                pid: 2,
                resident_bytes: 3,
                staged_bytes: 1,
                pool_bytes: 4,
                file_bytes: 6,
            }],
            statistics: Statistics::new(&stats(), 0.5, 3),
        };
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        assert_eq!(snapshot.limit(), (12, 200 << 20));
    }
}
