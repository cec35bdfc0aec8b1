//! The statistics of a supervisor, each defined once.
//!
//! Each line below generates the counter that threads add to, the field of [`Stats`], its JSON name
//! (with the feature `serde`), and its row in [`Totals::FIELDS`] or [`Now::FIELDS`], against which the
//! documentation is checked.

use crate::statistics::statistics;
use std::sync::atomic::{AtomicU64, Ordering};

/// Latency of fault service as the handler sees it, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FaultLatency {
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Maximum.
    pub max: u64,
}

/// Current usage of one program, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProgramUsage {
    /// PID of the program.
    pub pid: i32,
    /// Resident anonymous memory, staged pages included.
    pub resident_bytes: u64,
    /// Pages in the stage, not stored yet.
    pub staged_bytes: u64,
    /// Stored pages in the pool. A page shared by fork is charged to the parent while the parent lives.
    pub pool_bytes: u64,
    /// Stored pages in the swap file, charged like those in the pool.
    pub file_bytes: u64,
    /// Stored pages on other machines, charged like those in the pool.
    pub remote_bytes: u64,
}

/// Defines [`Totals`], and [`Counters`] from the fields that threads count.
macro_rules! totals {
    (
        counted { $($(#[doc = $cdoc:literal])+ $counter:ident,)* }
        computed { $($(#[doc = $vdoc:literal])+ $value:ident,)* }
    ) => {
        statistics! {
            /// Statistics since the start of the run, and its limits. Bytes and pages are exact; peaks
            /// are the largest samples.
            #[derive(Default)]
            Totals { $($(#[doc = $cdoc])+ $counter,)* $($(#[doc = $vdoc])+ $value,)* }
        }

        /// Counters that all threads add to. All accesses are Relaxed: no data depends on their order.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[doc = $cdoc])+ pub(crate) $counter: AtomicU64,)*
        }

        impl Counters {
            /// The current counts; fields computed elsewhere are 0.
            pub(crate) fn totals(&self) -> Totals {
                Totals {
                    $($counter: self.$counter.load(Ordering::Relaxed),)*
                    ..Totals::default()
                }
            }
        }
    };
}

statistics! {
    /// Current usage, in bytes.
    #[derive(Default)]
    Now {
        /// Resident anonymous memory, staged pages included.
        resident_bytes,
        /// The compressed pool.
        pool_bytes,
        /// Swap tables and page states.
        metadata_bytes,
        /// Pages on their way out, part of `resident_bytes`.
        staged_bytes,
        /// Stored pages in the swap file.
        file_bytes,
        /// Stored pages on other machines (`--remote`).
        remote_bytes,
        /// Resident file-backed and shared memory of the programs, which is not under the limit. What
        /// several programs map counts for each.
        mapped_bytes,
        /// Number of programs under the limit now.
        processes_now,
    }
}

totals! {
    counted {
        /// Largest `resident_bytes`.
        peak_resident_bytes,
        /// Largest `pool_bytes`.
        peak_pool_bytes,
        /// Largest sum of resident, pool and metadata bytes.
        peak_total_bytes,
        /// Largest sum of resident memory and of pages that are out, at their full size: what the programs
        /// would take without a limit.
        peak_needed_bytes,
        /// Largest `mapped_bytes`.
        peak_mapped_bytes,
        /// Largest `file_bytes`.
        peak_file_bytes,
        /// Largest `remote_bytes`.
        peak_remote_bytes,
        /// Largest size of the swap tables.
        peak_table_bytes,
        /// Slots that held a page at that moment.
        peak_table_slots,
        /// Faults that brought back a page from the pool or the file.
        faults_swap_in,
        /// First touches of a page.
        faults_zero_fill,
        /// Faults on a page in the swap cache (staged, not yet stored).
        faults_cache,
        /// Pages stored.
        pages_out,
        /// Pages brought back from the pool or the file, readahead included.
        pages_in,
        /// Program images that were under the limit.
        processes,
        /// Connections that memfold closed: of processes outside the run, or for want of descriptors.
        connections_refused,
        /// Largest excess over the limit that reclaim could not remove, in pages.
        over_limit_pages,
        /// Time for which the limit was exceeded by more than is tolerated.
        over_limit_ns,
        /// Time for which threads waited for pages that were out or staged, for the copy of a shared page, or
        /// for room: from the reading of the fault to its service.
        swap_in_wait_ns,
        /// The same for first touches of pages, where there was room.
        first_touch_wait_ns,
        /// Longest time in which the supervisor could not sample the programs' sizes, for want of a
        /// CPU or a lock.
        longest_pause_ns,
    }
    computed {
        /// The total limit in force; 0 where only the resident limit is set.
        limit_bytes,
        /// The resident limit in force: with a total limit, what pool and metadata leave of it.
        resident_limit_bytes,
        /// Stored pages that were one repeated word.
        pages_same_filled,
        /// Bytes that the stored pages took in the pool.
        bytes_stored,
        /// Bytes of the stored pages before compression.
        bytes_original,
        /// Stored pages that were compressed again, with Zstandard.
        pages_recompressed,
        /// Those of them that were compressed together with neighbours, as blocks.
        pages_in_blocks,
        /// Stored pages that were written to the swap file.
        pages_written_back,
        /// Reads and writes of the swap file that failed.
        file_errors,
        /// Pages that a store on other machines has acknowledged.
        remote_pages_out,
        /// Pages that came back from there.
        remote_pages_in,
        /// Requests to it that were repeated.
        remote_retries,
        /// Batches that it did not acknowledge, whose pages stayed, and pages that could not be brought
        /// back.
        remote_failures,
        /// Pages that it was found to have lost.
        remote_lost_pages,
        /// Pages read from their copy in the swap file instead (`--remote-keep-copy`).
        remote_copies_read,
    }
}

/// All statistics of a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Current usage.
    pub now: Now,
    /// Totals and peaks since the start.
    pub totals: Totals,
    /// The limit that was exceeded the most, by more than is tolerated; 0 if every limit so far was kept.
    pub exceeded_limit_bytes: u64,
    /// By how much.
    pub exceeded_by_bytes: u64,
    /// Latency of fault service.
    pub fault_ns: FaultLatency,
    /// The part of it for pages on other machines.
    pub remote_fault_ns: FaultLatency,
}
