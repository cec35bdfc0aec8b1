//! `memfold stat`.

use crate::arguments::StatArguments;
use crate::describe::print;
use crate::disk_report::DiskSnapshot;
use crate::failure::Failure;
use crate::format::{at_ratio, bytes, grouped, nanoseconds, printable};
use crate::instance::Instance;
use crate::live;
pub use crate::live::nothing_runs;
use crate::report::{Snapshot, Statistics};
use crate::stat_watch;
use crate::summary::at_most;
use std::process::ExitCode;
use std::time::Duration;

/// `memfold stat [--json] [--watch] [PID]`: exit status 1 when nothing runs, but for `--json` without a PID, whose list is
/// empty then.
pub fn stat(arguments: &StatArguments) -> Result<ExitCode, Failure> {
    if let Some(seconds) = arguments.watch {
        let interval = Duration::from_secs(seconds.into());
        return stat_watch::watch(arguments.pid, interval, arguments.json);
    }
    let found = live::instances_of(arguments.pid, live::PATIENCE);
    if let (Some(pid), true) = (arguments.pid, found.is_empty()) {
        return Err(nothing_runs(Some(pid)));
    }
    if arguments.json {
        let text = match (arguments.pid, found.first()) {
            (Some(_), Some(instance)) => serde_json::to_string_pretty(instance),
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

/// A run or a disk in a few lines.
fn block(instance: &Instance) -> String {
    match instance {
        Instance::Run(run) => run_block(run),
        Instance::Disk(disk) => disk_block(disk),
    }
}

fn disk_block(disk: &DiskSnapshot) -> String {
    let mut text = format!("disk {} (memfold {})\n", disk.address, disk.pid);
    for (name, value) in disk_lines(disk) {
        text.push_str(&format!("  {name:<10} {value}\n"));
    }
    text
}

/// What a disk holds, and what was done for its clients.
fn disk_lines(disk: &DiskSnapshot) -> [(&'static str, String); 6] {
    let (statistics, usage) = (&disk.statistics, &disk.statistics.usage);
    let packed = at_ratio(usage.original_bytes, usage.stored_bytes);
    let used = format!(
        "{} of {}, {} at the peak; the disk has {}",
        bytes(usage.used_bytes),
        bytes(usage.limit_bytes),
        bytes(usage.peak_bytes),
        bytes(usage.size_bytes)
    );
    let blocks = format!(
        "{}{packed}, {} same-filled, {} incompressible, {} in the swap file ({})",
        bytes(usage.original_bytes),
        grouped(usage.same_filled_blocks),
        grouped(usage.incompressible_blocks),
        grouped(usage.file_blocks),
        bytes(usage.file_bytes)
    );
    let requests = format!(
        "{} read in {}, {} written in {}, {} discarded in {} ({} blocks not freed yet)",
        bytes(usage.read_bytes),
        grouped(usage.reads),
        bytes(usage.written_bytes),
        grouped(usage.writes),
        bytes(usage.discarded_bytes),
        grouped(usage.discards),
        grouped(usage.discard_backlog_blocks)
    );
    let failed = format!(
        "{} reads, {} writes",
        grouped(usage.failed_reads),
        grouped(usage.failed_writes)
    );
    let clients = format!(
        "{} now, {} so far, {} refused",
        disk.connections_now, statistics.connections, statistics.connections_refused
    );
    let time = format!(
        "serving for {:.0} s, {:.2} s of CPU time in memfold",
        disk.uptime_seconds, statistics.cpu_seconds
    );
    [
        ("used", used),
        ("blocks", blocks),
        ("requests", requests),
        ("failed", failed),
        ("clients", clients),
        ("time", time),
    ]
}

/// A run in a few lines.
fn run_block(snapshot: &Snapshot) -> String {
    let name = match &snapshot.statistics.programs.name {
        Some(name) => format!("{}: ", printable(name)),
        None => String::new(),
    };
    let mut text = format!("{name}{} (memfold {})\n", snapshot.command, snapshot.pid);
    for (name, value) in memory(snapshot).into_iter().chain(work(snapshot)) {
        text.push_str(&format!("  {name:<10} {value}\n"));
    }
    text
}

/// What is in use, and what is not under the limit.
fn memory(snapshot: &Snapshot) -> [(&'static str, String); 4] {
    let (statistics, now) = (&snapshot.statistics, &snapshot.now);
    let totals = &statistics.totals;
    let (held, limit) = snapshot.limit();
    let packed = at_ratio(totals.bytes_original, totals.bytes_stored);
    let over = if statistics.is_limit_kept() {
        String::new()
    } else {
        format!(
            " (NOT kept: {} over it at most)",
            bytes(statistics.exceeded_by_bytes)
        )
    };
    let now_text = format!(
        "resident {}, pool {}{packed}, metadata {}, swap file {}, remote {}",
        bytes(now.resident_bytes),
        bytes(now.pool_bytes),
        bytes(now.metadata_bytes),
        bytes(now.file_bytes),
        bytes(now.remote_bytes)
    );
    let peak = format!(
        "resident {}, pool {}, together {}; without a limit {}",
        bytes(totals.peak_resident_bytes),
        bytes(totals.peak_pool_bytes),
        bytes(totals.peak_total_bytes),
        bytes(totals.peak_needed_bytes)
    );
    let unmanaged = format!(
        "{} of mapped and shared memory, {} in processes not under the limit (peak)",
        bytes(now.mapped_bytes),
        bytes(statistics.programs.peak_unmanaged_bytes)
    );
    [
        ("used", format!("{} of {}{over}", bytes(held), bytes(limit))),
        ("now", now_text),
        ("peak", peak),
        ("unmanaged", unmanaged),
    ]
}

/// What went to a store on other machines and came back, and what failed.
fn remote(statistics: &Statistics) -> String {
    let (totals, faults) = (&statistics.totals, &statistics.remote_fault_ns);
    format!(
        "{} out, {} in (p50 {}, p99 {}, longest {}), {} retries, {} failures, {} lost",
        grouped(totals.remote_pages_out),
        grouped(totals.remote_pages_in),
        nanoseconds(faults.p50),
        nanoseconds(faults.p99),
        nanoseconds(faults.max),
        grouped(totals.remote_retries),
        grouped(totals.remote_failures),
        grouped(totals.remote_lost_pages)
    )
}

/// What was done for the programs, and what that cost them.
fn work(snapshot: &Snapshot) -> Vec<(&'static str, String)> {
    let statistics = &snapshot.statistics;
    let totals = &statistics.totals;
    let comfortable = match statistics.programs.comfortable_limit_bytes {
        Some(limit) => format!("; {} with a limit of {}", at_most(), bytes(limit)),
        None => String::new(),
    };
    let share = statistics.swapping_share * 100.0;
    let pages = format!(
        "{} out ({} same-filled), {} in, {} recompressed ({} in blocks), {} written to the \
         file",
        grouped(totals.pages_out),
        grouped(totals.pages_same_filled),
        grouped(totals.pages_in),
        grouped(totals.pages_recompressed),
        grouped(totals.pages_in_blocks),
        grouped(totals.pages_written_back)
    );
    let faults = format!(
        "{} (p50 {}, p99 {}, longest {})",
        grouped(statistics.faults()),
        nanoseconds(statistics.fault_ns.p50),
        nanoseconds(statistics.fault_ns.p99),
        nanoseconds(statistics.fault_ns.max)
    );
    let unmanaged = match statistics.processes_unmanaged {
        0 => String::new(),
        count => format!(", {count} not under the limit"),
    };
    let processes = format!(
        "{} now, {} so far{unmanaged}",
        snapshot.now.processes_now, totals.processes
    );
    let time = format!(
        "running for {:.0} s, {:.2} s of CPU time in memfold",
        snapshot.uptime_seconds, statistics.cpu_seconds
    );
    let mut lines = vec![
        ("swapping", format!("{share:.0}% of the time{comfortable}")),
        ("pages", pages),
        ("faults", faults),
        ("processes", processes),
        ("time", time),
    ];
    if totals.peak_remote_bytes > 0 || totals.remote_failures > 0 {
        lines.insert(2, ("remote", remote(statistics)));
    }
    lines
}
