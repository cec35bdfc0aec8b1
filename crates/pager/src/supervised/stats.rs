//! What a supervisor counts.

/// Latency of fault service as the handler sees it, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultLatency {
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Largest seen.
    pub max: u64,
}

/// What one program uses now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramUsage {
    /// Its process number.
    pub pid: i32,
    /// Resident anonymous memory, staged pages included.
    pub resident_bytes: u64,
    /// Pages on their way out.
    pub staged_bytes: u64,
    /// Stored pages in the pool. Those that a fork shares are the parent's as long as it lives.
    pub pool_bytes: u64,
    /// Stored pages in the swap file; the same holds.
    pub file_bytes: u64,
}

/// Counters of a group since its start. Bytes and pages are exact; peaks are of what was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// The total limit in force, in bytes; 0 when only the resident limit is set.
    pub limit_bytes: u64,
    /// The resident limit in force now, in bytes (with a total limit: what pool and metadata leave).
    pub resident_limit_bytes: u64,
    /// Resident anonymous bytes now.
    pub resident_bytes: u64,
    /// Bytes of the compressed pool now.
    pub pool_bytes: u64,
    /// Bytes of swap tables and page states now.
    pub metadata_bytes: u64,
    /// Bytes of pages on their way out now, part of `resident_bytes`.
    pub staged_bytes: u64,
    /// Bytes that stored pages take in the swap file now.
    pub file_bytes: u64,
    /// Largest `resident_bytes` seen.
    pub peak_resident_bytes: u64,
    /// Largest `pool_bytes` seen.
    pub peak_pool_bytes: u64,
    /// Largest sum of resident, pool and metadata bytes seen.
    pub peak_total_bytes: u64,
    /// Largest `file_bytes` seen.
    pub peak_file_bytes: u64,
    /// Largest size of the swap tables seen, in bytes.
    pub peak_table_bytes: u64,
    /// Slots that held a page at that moment.
    pub peak_table_slots: u64,
    /// Faults that brought back a page from the pool.
    pub faults_swap_in: u64,
    /// First touches of a page.
    pub faults_zero_fill: u64,
    /// Faults on a page that was still staged.
    pub faults_cache: u64,
    /// Pages stored.
    pub pages_out: u64,
    /// Pages brought back from the pool, fault-around included.
    pub pages_in: u64,
    /// Stored pages that were one repeated word.
    pub pages_same_filled: u64,
    /// Bytes that the stored pages took in the pool.
    pub bytes_stored: u64,
    /// Bytes of the stored pages before compression.
    pub bytes_original: u64,
    /// Stored pages that were compressed again.
    pub pages_recompressed: u64,
    /// Stored pages that were written to the swap file.
    pub pages_written_back: u64,
    /// Reads and writes of the swap file that failed.
    pub file_errors: u64,
    /// Address spaces that were managed (one a process image).
    pub processes: u64,
    /// Address spaces managed now.
    pub processes_now: u64,
    /// Connections that were hung up on: of others than the run's own programs, or for want of descriptors.
    pub connections_refused: u64,
    /// Largest excess over the limit that reclaim could not remove, in pages.
    pub over_limit_pages: u64,
    /// Longest time in which nobody looked how large the programs are, beyond what was meant, in
    /// nanoseconds: the supervisor got no CPU, or waited for a lock of a program's. Meanwhile a
    /// program can outgrow its limit.
    pub longest_pause_ns: u64,
    /// Fault service latency.
    pub fault_ns: FaultLatency,
}
