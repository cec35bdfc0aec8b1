//! Frees nodes of page tables that became empty without an event.
//!
//! An unmapping frees what it empties at once (`events.rs`). But pages that `madvise` dropped become
//! holes only when the clock hand comes to them, and a fault that is served late makes an entry where
//! nothing is mapped any more. So the governor goes over the table of a program now and then, a part
//! at a time, if there may be something to free.

use crate::page::VirtualPage;
use crate::supervised::space::AddressSpace;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Milliseconds from the beginning of one sweep to the next; more keeps empty nodes longer.
const PERIOD: u64 = 1000;
/// Leaves looked at while the gate is held once; more keeps faults waiting for longer.
const LEAVES: usize = 512;
/// How long a sweep waits for the gate before another tick.
const PATIENCE: Duration = Duration::from_millis(1);

/// How far the sweep of one table is; the governor's alone, but for `holes`.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Milliseconds since the supervisor's start.
    next: AtomicU64,
    from: AtomicU64,
    /// Entries became holes outside of events.
    pub holes: AtomicBool,
}

impl AddressSpace {
    /// Sweeps a part of the table if that is due.
    pub fn sweep_table(&self) {
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
