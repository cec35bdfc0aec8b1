//! What is known of the chosen run or disk, in words.

use crate::disk_report::DiskSnapshot;
use crate::format::{at_ratio, bytes, grouped, nanoseconds};
use crate::instance::Instance;
use crate::report::Snapshot;

/// What is known of a run or disk, in parts that stay whole.
pub fn parts(instance: &Instance) -> Vec<String> {
    match instance {
        Instance::Run(run) => of_run(run),
        Instance::Disk(disk) => of_disk(disk),
    }
}

fn of_disk(disk: &DiskSnapshot) -> Vec<String> {
    let (statistics, usage) = (&disk.statistics, &disk.statistics.usage);
    let packed = at_ratio(usage.original_bytes, usage.stored_bytes);
    let mut parts = vec![
        format!("disk of {}", bytes(usage.size_bytes)),
        format!("blocks {}{packed}", bytes(usage.original_bytes)),
        format!("peak {}", bytes(usage.peak_bytes)),
    ];
    if usage.file_blocks > 0 {
        parts.push(format!("swap file {}", bytes(usage.file_bytes)));
    }
    parts.extend([
        format!("{} read", bytes(usage.read_bytes)),
        format!("{} written", bytes(usage.written_bytes)),
        format!("{} discarded", bytes(usage.discarded_bytes)),
        format!("{} failed reads", grouped(usage.failed_reads)),
        format!("{} failed writes", grouped(usage.failed_writes)),
        format!("{} clients now", grouped(disk.connections_now)),
        format!("{} clients so far", grouped(statistics.connections)),
        format!(
            "memfold's CPU {:.1} s in {:.0} s",
            statistics.cpu_seconds, disk.uptime_seconds
        ),
    ]);
    parts
}

fn of_run(run: &Snapshot) -> Vec<String> {
    let statistics = &run.statistics;
    let totals = &statistics.totals;
    let packed = at_ratio(totals.bytes_original, totals.bytes_stored);
    let mut parts = vec![
        format!("resident {}", bytes(run.now.resident_bytes)),
        format!("resident peak {}", bytes(totals.peak_resident_bytes)),
        format!("pool {}{packed}", bytes(run.now.pool_bytes)),
        format!("pool peak {}", bytes(totals.peak_pool_bytes)),
        format!("metadata {}", bytes(run.now.metadata_bytes)),
    ];
    if totals.peak_file_bytes > 0 {
        parts.push(format!("swap file {}", bytes(run.now.file_bytes)));
    }
    if totals.peak_remote_bytes > 0 {
        parts.push(format!("remote {}", bytes(run.now.remote_bytes)));
        parts.push(format!("{} remote retries", grouped(totals.remote_retries)));
        parts.push(format!(
            "{} remote failures",
            grouped(totals.remote_failures)
        ));
    }
    parts.extend([
        format!("{} pages out", grouped(totals.pages_out)),
        format!("{} pages in", grouped(totals.pages_in)),
        format!("{} swap-in faults", grouped(totals.faults_swap_in)),
        format!("{} first touches", grouped(totals.faults_zero_fill)),
        format!("{} faults from the stage", grouped(totals.faults_cache)),
        format!("p50 {}", nanoseconds(statistics.fault_ns.p50)),
        format!("p90 {}", nanoseconds(statistics.fault_ns.p90)),
        format!("p99 {}", nanoseconds(statistics.fault_ns.p99)),
        format!("longest {}", nanoseconds(statistics.fault_ns.max)),
        format!("{} programs now", grouped(run.now.processes_now)),
        format!("{} programs so far", grouped(totals.processes)),
        format!(
            "{} not under the limit",
            grouped(statistics.processes_unmanaged)
        ),
        format!(
            "memfold's CPU {:.1} s in {:.0} s",
            statistics.cpu_seconds, run.uptime_seconds
        ),
    ]);
    parts
}
