//! `memfold stat`.

use crate::arguments::StatArguments;
use crate::describe::print;
use crate::failure::Failure;
use crate::format::{bytes, grouped, nanoseconds, ratio};
use crate::live;
use crate::report::Snapshot;
use std::process::ExitCode;

/// `memfold stat [--json] [PID]`: exit status 1 when nothing runs.
pub fn stat(arguments: &StatArguments) -> Result<ExitCode, Failure> {
    let found = live::snapshots_of(arguments.pid, live::PATIENCE);
    if let (Some(pid), true) = (arguments.pid, found.is_empty()) {
        return Err(nothing_runs(Some(pid)));
    }
    if arguments.json {
        let text = match (arguments.pid, found.first()) {
            (Some(_), Some(snapshot)) => serde_json::to_string_pretty(snapshot),
            _ => serde_json::to_string_pretty(&found),
        };
        let text = text.map_err(|error| Failure::own(format!("cannot write JSON: {error}")))?;
        return print(format!("{text}\n").as_bytes());
    }
    if found.is_empty() {
        return Err(nothing_runs(None));
    }
    let blocks: Vec<String> = found.iter().map(block).collect();
    print(blocks.join("\n").as_bytes())
}

/// There is nothing to show.
pub fn nothing_runs(pid: Option<u32>) -> Failure {
    let text = match pid {
        Some(pid) => format!("no run of this user has the PID {pid}; list them with memfold stat"),
        None => "no run of this user is active; start one with memfold run".to_owned(),
    };
    Failure::with_status(1, text)
}

/// A run in a few lines.
fn block(snapshot: &Snapshot) -> String {
    let statistics = &snapshot.statistics;
    let (held, limit) = snapshot.limit();
    let packed = ratio(
        statistics.totals.bytes_original,
        statistics.totals.bytes_stored,
    )
    .map(|ratio| format!(" at {ratio}"))
    .unwrap_or_default();
    let faults = statistics
        .totals
        .faults_swap_in
        .saturating_add(statistics.totals.faults_zero_fill);
    let faults = faults.saturating_add(statistics.totals.faults_cache);
    let unmanaged = match statistics.processes_unmanaged {
        0 => String::new(),
        count => format!(", {count} not under the limit"),
    };
    let rows = [
        ("held", format!("{} of {}", bytes(held), bytes(limit))),
        (
            "now",
            format!(
                "resident {}, pool {}{packed}, metadata {}, swap file {}",
                bytes(snapshot.now.resident_bytes),
                bytes(snapshot.now.pool_bytes),
                bytes(snapshot.now.metadata_bytes),
                bytes(snapshot.now.file_bytes)
            ),
        ),
        (
            "peak",
            format!(
                "resident {}, pool {}, together {}",
                bytes(statistics.totals.peak_resident_bytes),
                bytes(statistics.totals.peak_pool_bytes),
                bytes(statistics.totals.peak_total_bytes)
            ),
        ),
        (
            "pages",
            format!(
                "{} out ({} same-filled), {} in, {} recompressed, {} written to the file",
                grouped(statistics.totals.pages_out),
                grouped(statistics.totals.pages_same_filled),
                grouped(statistics.totals.pages_in),
                grouped(statistics.totals.pages_recompressed),
                grouped(statistics.totals.pages_written_back)
            ),
        ),
        (
            "faults",
            format!(
                "{} (p50 {}, p99 {}, longest {})",
                grouped(faults),
                nanoseconds(statistics.fault_ns.p50),
                nanoseconds(statistics.fault_ns.p99),
                nanoseconds(statistics.fault_ns.max)
            ),
        ),
        (
            "processes",
            format!(
                "{} now, {} so far{unmanaged}",
                snapshot.now.processes_now, statistics.totals.processes
            ),
        ),
        (
            "time",
            format!(
                "running for {:.0} s, {:.2} s of CPU time in memfold",
                snapshot.uptime_seconds, statistics.cpu_seconds
            ),
        ),
    ];
    let mut text = format!("{} (memfold {})\n", snapshot.command, snapshot.pid);
    for (name, value) in rows {
        text.push_str(&format!("  {name:<10} {value}\n"));
    }
    text
}
