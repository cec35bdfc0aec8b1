//! Freeing page-table nodes that became empty without an event.
//!
//! An unmap event frees the nodes that it empties (`fault/handler.rs`). But pages dropped by `madvise`
//! become holes only when the clock hand reaches them, and a late fault may allocate nodes where
//! nothing is mapped any more. So the governor sweeps a table in steps when it may have empty nodes.

use crate::page::VirtualPage;
use crate::supervised::space::AddressSpace;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Minimum milliseconds between the starts of two sweeps. More keeps empty nodes for longer.
const PERIOD: u64 = 1000;
/// Leaves visited per entry to the gate. More blocks faults for longer.
const LEAVES: usize = 4096;
/// Longest wait for the gate; then the sweep continues at another tick. More delays the governor.
const PATIENCE: Duration = Duration::from_millis(1);

/// Progress of the sweep of one table. Only the governor uses it, except for `holes`; all accesses are
/// Relaxed.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    /// Earliest start of the next sweep, in milliseconds since the supervisor's start.
    next: AtomicU64,
    /// The page to continue from; 0 between sweeps.
    from: AtomicU64,
    /// Entries became holes without an event.
    pub holes: AtomicBool,
}

impl AddressSpace {
    /// Sweeps a part of the table if a sweep is due.
    pub(crate) fn sweep_table(&self) {
        let sweep = &self.sweep;
        let from = sweep.from.load(Ordering::Relaxed);
        let now = self.resources.milliseconds();
        if from == 0 {
            let grown = self.table_use.has_grown();
            if now < sweep.next.load(Ordering::Relaxed)
                || !(grown || sweep.holes.load(Ordering::Relaxed))
            {
                return;
            }
        }
        let Ok(mut gate) = self.exclusive_within(PATIENCE) else {
            return;
        };
        if from == 0 {
            sweep.holes.store(false, Ordering::Relaxed);
            sweep.next.store(now + PERIOD, Ordering::Relaxed);
        }
        let next = gate.table_mut().sweep(VirtualPage(from), LEAVES);
        sweep.from.store(next.0, Ordering::Relaxed);
    }
}
