//! The part of an address space that prepared forks need (`fork/prepared.rs`). Data only.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Unused where the kernel reports forks.
#[derive(Default)]
pub struct Prepared {
    /// What the helper was asked to withhold from children, and where it moved since. Every VMA that is withheld
    /// intersects it.
    pub withheld: Mutex<RangeSet>,
    /// What was moved while a thread forked, and may not be withheld where it is now.
    pub moved: Mutex<RangeSet>,
    /// Changes of mappings that were applied: what was withheld before one may be elsewhere after it. Changes under the
    /// exclusive gate.
    pub changes: AtomicU32,
    /// The program has seccomp filters of its own, and is to be managed no more. Its forking thread waits for that.
    pub releases: AtomicBool,
    /// It is managed no more.
    pub released: AtomicBool,
    /// Forks in a row that kept the gate for long. Relaxed: only counted.
    pub expired: AtomicU32,
}

impl Prepared {
    /// Whether what was withheld at `changes` is where it was: else something else may be mapped there. The gate is
    /// held exclusively.
    pub fn is_still_withheld(&self, changes: u32) -> bool {
        Bug::ManagedUnwithheld.is_back() || self.changes.load(Ordering::Relaxed) == changes
    }

    /// Memory was moved, and is withheld where it is now, too. (Where it was may be something else, or empty.)
    pub fn note_move(&self, from: PageRange, to: VirtualPage, beside_a_fork: bool) {
        let mut withheld = lock(&self.withheld);
        for part in withheld.covered(from) {
            let part = part.moved(from.start, to);
            withheld.add(part);
            if beside_a_fork {
                lock(&self.moved).add(part);
            }
        }
    }
}
