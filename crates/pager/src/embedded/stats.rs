//! The statistics of an engine, defined once: [`Stats`], the engine's counters, and through
//! [`Stats::FIELDS`] the C structure and the Python dictionary all come from one table.

use super::config::Mode;
use crate::statistics::statistics;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Makes [`Stats`], [`Counters`] and [`Gauges`] of the table below. A `counter` is counted by the
/// engine's threads; a `gauge` is computed by `EngineState::gauges` when statistics are taken.
macro_rules! engine_statistics {
    ($($(#[doc = $doc:literal])+ $kind:ident $name:ident;)+) => {
        statistics! {
            /// Statistics of an engine. Counters are exact, and count from its start.
            #[non_exhaustive]
            Stats [
                /// How faults are served.
                mode: Mode,
            ] {
                $($(#[doc = $doc])+ $name,)+
            }
        }

        impl Stats {
            /// All numbers, in the order of [`FIELDS`](Self::FIELDS).
            pub fn values(&self) -> [u64; Self::FIELDS.len()] {
                [$(self.$name),+]
            }

            pub(super) fn new(mode: Mode, counters: &Counters, gauges: Gauges) -> Stats {
                Stats { mode, $($name: engine_statistics!(@value $kind $name counters gauges),)+ }
            }
        }

        engine_statistics!(@split {} {} $($kind $name;)+);
    };
    (@value counter $name:ident $counters:ident $gauges:ident) => { $counters.$name.load(Relaxed) };
    (@value gauge $name:ident $counters:ident $gauges:ident) => { $gauges.$name };
    (@split {$($counter:ident)*} {$($gauge:ident)*} counter $name:ident; $($rest:tt)*) => {
        engine_statistics!(@split {$($counter)* $name} {$($gauge)*} $($rest)*);
    };
    (@split {$($counter:ident)*} {$($gauge:ident)*} gauge $name:ident; $($rest:tt)*) => {
        engine_statistics!(@split {$($counter)*} {$($gauge)* $name} $($rest)*);
    };
    (@split {$($counter:ident)*} {$($gauge:ident)*}) => {
        /// The counters, which faulting threads and the engine's own add to.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $counter: AtomicU64,)* }

        /// The statistics that are computed when they are asked for.
        #[derive(Debug)]
        pub(crate) struct Gauges { $(pub(crate) $gauge: u64,)* }
    };
}

// The order is that of the C structure: append only, until the major version changes.
engine_statistics! {
    /// The limit on everything, in bytes; 0 where only the resident limit is set.
    gauge limit_bytes;
    /// Bytes that may be resident now: what the pool and the metadata leave of the limit.
    gauge resident_limit_bytes;
    /// Bytes of regions that are resident now, those in the stage included.
    gauge resident_bytes;
    /// The peak of `resident_bytes`.
    gauge peak_resident_bytes;
    /// Bytes of memory that the compressed pool takes now.
    gauge pool_bytes;
    /// Bytes of memory that swap tables and page states take now.
    gauge metadata_bytes;
    /// Bytes of all regions.
    gauge mapped_bytes;
    /// Bytes of regions that are pinned.
    gauge pinned_bytes;
    /// Pages that are stored in the pool now, same-filled ones included.
    gauge stored_pages;
    /// Stored pages that repeat one word and take no room in the pool.
    gauge same_filled_pages;
    /// Compressed bytes of all stored pages.
    gauge stored_bytes;
    /// Faults that swapped pages in from the pool.
    counter faults_swap_in;
    /// Faults on pages that were never touched before, or were discarded.
    counter faults_zero_fill;
    /// Faults on pages that were still in the stage.
    counter faults_cache;
    /// Pages stored in the pool.
    counter pages_out;
    /// Pages swapped in from the pool, by faults, prefetch and readahead.
    counter pages_in;
    /// Pages of `pages_in` that the readahead thread swapped in, or a fault around its own page.
    counter pages_read_ahead;
    /// Pages filled with zeros.
    counter pages_zero_filled;
    /// Faults that had to reclaim memory themselves.
    counter direct_reclaims;
    /// Pages that could not be stored, and stayed resident.
    counter store_failures;
    /// The most pages that were ever resident above the limit, because the rest could not be moved
    /// out, or moving it out gained nothing.
    gauge over_limit_pages;
    /// Pages that were moved out by `mremap`, as the kernel has no `UFFDIO_MOVE` (before Linux 6.8).
    counter pages_remapped;
    /// Stored pages that are in the store on other machines now. All `remote` statistics are 0 without one.
    gauge remote_pages;
    /// Bytes that they take there, without its overhead.
    gauge remote_bytes;
    /// Pages that it has acknowledged so far.
    gauge remote_pages_out;
    /// Pages that came back from it so far.
    gauge remote_pages_in;
    /// Faults of `faults_swap_in` that waited for it.
    counter remote_faults;
    /// Pages that are waited for now.
    gauge remote_waiting;
    /// Requests to it that were repeated.
    gauge remote_retries;
    /// Batches that it did not acknowledge, whose pages stayed, and pages that could not be brought back.
    gauge remote_failures;
    /// Pages that it was found to have lost when their time to live was renewed.
    gauge remote_lost_pages;
    /// Waits of threads that needed room for the store to take pages.
    counter remote_room_waits;
}

/// Adds to a counter.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_in_the_order_of_the_fields() {
        let counters = Counters::default();
        count(&counters.pages_in, 7);
        let gauges = Gauges {
            limit_bytes: 1,
            resident_limit_bytes: 2,
            resident_bytes: 3,
            peak_resident_bytes: 4,
            pool_bytes: 5,
            metadata_bytes: 6,
            mapped_bytes: 0,
            pinned_bytes: 0,
            stored_pages: 0,
            same_filled_pages: 0,
            stored_bytes: 0,
            over_limit_pages: 9,
            remote_pages: 0,
            remote_bytes: 0,
            remote_pages_out: 0,
            remote_pages_in: 0,
            remote_waiting: 0,
            remote_retries: 0,
            remote_failures: 0,
            remote_lost_pages: 10,
        };
        let stats = Stats::new(Mode::Signal, &counters, gauges);
        let value = |name| {
            let at = Stats::FIELDS.iter().position(|field| field.name == name);
            stats.values()[at.unwrap()]
        };
        assert_eq!((value("limit_bytes"), value("metadata_bytes")), (1, 6));
        assert_eq!((value("pages_in"), value("pages_out")), (7, 0));
        assert_eq!((stats.pages_in, value("over_limit_pages")), (7, 9));
        assert_eq!(value("remote_lost_pages"), 10);
    }
}
