//! The statistics of a supervisor, each defined once.
//!
//! Each line below generates the counter that threads add to, the field of [`Stats`], its JSON name
//! (with the feature `serde`), and its row in [`Totals::FIELDS`] or [`Now::FIELDS`], against which the
//! documentation is checked.

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
}

/// Defines a struct of `u64` fields and a table of their names and meanings.
macro_rules! numbers {
    ($(#[$meta:meta])* $name:ident { $(#[doc = $doc:literal] $field:ident,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name {
            $(#[doc = $doc] pub $field: u64,)*
        }

        impl $name {
            /// JSON names of the fields and their meanings.
            pub const FIELDS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), $doc),)*];
        }
    };
}

/// Defines [`Totals`], and [`Counters`] from the fields that threads count.
macro_rules! totals {
    (counted { $(#[doc = $cdoc:literal] $counter:ident,)* } computed { $(#[doc = $vdoc:literal] $value:ident,)* }) => {
        numbers! {
            /// Statistics since the start of the run, and its limits. Bytes and pages are exact; peaks
            /// are the largest samples.
            Totals { $(#[doc = $cdoc] $counter,)* $(#[doc = $vdoc] $value,)* }
        }

        /// Counters that all threads add to. All accesses are Relaxed: no data depends on their order.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $cdoc] pub $counter: AtomicU64,)*
        }

        impl Counters {
            /// The current counts; fields computed elsewhere are 0.
            pub fn totals(&self) -> Totals {
                Totals {
                    $($counter: self.$counter.load(Ordering::Relaxed),)*
                    ..Totals::default()
                }
            }
        }
    };
}

numbers! {
    /// Current usage, in bytes.
    Now {
        #[doc = "resident anonymous memory, staged pages included"]
        resident_bytes,
        #[doc = "the compressed pool"]
        pool_bytes,
        #[doc = "swap tables and page states"]
        metadata_bytes,
        #[doc = "pages on their way out, part of `resident_bytes`"]
        staged_bytes,
        #[doc = "stored pages in the swap file"]
        file_bytes,
        #[doc = "number of programs under the limit now"]
        processes_now,
    }
}

totals! {
    counted {
        #[doc = "largest `resident_bytes`"]
        peak_resident_bytes,
        #[doc = "largest `pool_bytes`"]
        peak_pool_bytes,
        #[doc = "largest sum of resident, pool and metadata bytes"]
        peak_total_bytes,
        #[doc = "largest `file_bytes`"]
        peak_file_bytes,
        #[doc = "largest size of the swap tables"]
        peak_table_bytes,
        #[doc = "slots that held a page at that moment"]
        peak_table_slots,
        #[doc = "faults that brought back a page from the pool or the file"]
        faults_swap_in,
        #[doc = "first touches of a page"]
        faults_zero_fill,
        #[doc = "faults on a page in the swap cache (staged, not yet stored)"]
        faults_cache,
        #[doc = "pages stored"]
        pages_out,
        #[doc = "pages brought back from the pool or the file, readahead included"]
        pages_in,
        #[doc = "program images that were under the limit"]
        processes,
        #[doc = "connections that memfold hung up on: of processes outside the run, or for want of descriptors"]
        connections_refused,
        #[doc = "largest excess over the limit that reclaim could not remove, in pages"]
        over_limit_pages,
        #[doc = "longest time in which the supervisor could not sample the programs' sizes, for want of a CPU or a lock"]
        longest_pause_ns,
    }
    computed {
        #[doc = "the total limit in force; 0 where only the resident limit is set"]
        limit_bytes,
        #[doc = "the resident limit in force: with a total limit, what pool and metadata leave of it"]
        resident_limit_bytes,
        #[doc = "stored pages that were one repeated word"]
        pages_same_filled,
        #[doc = "bytes that the stored pages took in the pool"]
        bytes_stored,
        #[doc = "bytes of the stored pages before compression"]
        bytes_original,
        #[doc = "stored pages that were compressed again, with Zstandard"]
        pages_recompressed,
        #[doc = "stored pages that were written to the swap file"]
        pages_written_back,
        #[doc = "reads and writes of the swap file that failed"]
        file_errors,
    }
}

/// All statistics of a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Current usage.
    pub now: Now,
    /// Totals and peaks since the start.
    pub totals: Totals,
    /// Latency of fault service.
    pub fault_ns: FaultLatency,
}
