//! Entry to the gate of an address space, and by way of it to its page table.
//!
//! Nodes of the table are freed while the gate is held exclusively, so a reference to one must not
//! outlive an entry to the gate: the table can be had from an entry alone. The gate is the
//! supervisor's own (`memfold_sys::gate`): nothing that a program writes lets two threads in.

use crate::page_table::PageTable;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::held_up;
use memfold_sys::gate::{Abandoned, NAP_NS};
use std::cell::{LazyCell, UnsafeCell};
use std::time::{Duration, Instant};

/// What can be had by an entry to the gate alone.
#[derive(Default)]
pub struct Gated<T>(UnsafeCell<T>);

// SAFETY: shared references come from entries of both kinds, and a mutable one from an exclusive
// entry that is borrowed mutably, besides which there is no other entry.
unsafe impl<T: Send + Sync> Sync for Gated<T> {}

impl<T> Gated<T> {
    /// For who has it alone anyway.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

/// Entry to the gate, of either kind.
pub trait Inside {
    /// The page table.
    fn table(&self) -> &PageTable;
}

/// Entry to the gate for changing pages; leaves on drop.
pub struct Shared<'a>(&'a AddressSpace);

impl Inside for Shared<'_> {
    fn table(&self) -> &PageTable {
        // SAFETY: a mutable reference needs an exclusive entry, and there is none as long as this
        // one lasts.
        unsafe { &*self.0.table.0.get() }
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.0.channel.gate().leave_shared();
    }
}

/// Entry to the gate for reading messages and applying events; leaves on drop.
pub struct Exclusive<'a>(&'a AddressSpace);

impl Inside for Exclusive<'_> {
    fn table(&self) -> &PageTable {
        // SAFETY: this is the only entry, and a mutable reference borrows it mutably.
        unsafe { &*self.0.table.0.get() }
    }
}

impl Exclusive<'_> {
    /// The page table, for who frees nodes.
    pub fn table_mut(&mut self) -> &mut PageTable {
        // SAFETY: this is the only entry, and it is borrowed mutably.
        unsafe { &mut *self.0.table.0.get() }
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.0.channel.helper_gate().open();
        self.0.channel.gate().leave_exclusive();
    }
}

impl AddressSpace {
    /// Enters the gate to change pages. Only the supervisor's own threads keep others waiting here.
    pub fn shared(&self) -> Result<Shared<'_>, Abandoned> {
        let give_up = || {
            held_up::held_up();
            self.is_dead_or_gone()
        };
        let nap = held_up::PATIENCE.as_nanos() as u64;
        self.channel.gate().enter_shared(nap, give_up)?;
        Ok(Shared(self))
    }

    /// The same, or gives up: events are read until the program leaves its mappings alone, which it may not.
    pub fn shared_within(&self, patience: Duration) -> Result<Shared<'_>, Abandoned> {
        let began = LazyCell::new(Instant::now);
        let give_up = || self.is_dead_or_gone() || began.elapsed() >= patience;
        let nap = patience.as_nanos() as u64;
        self.channel.gate().enter_shared(nap, give_up)?;
        Ok(Shared(self))
    }

    /// The same if nobody holds it exclusively just now.
    pub fn try_shared(&self) -> Option<Shared<'_>> {
        let entered = self.channel.gate().try_enter_shared();
        // Not `then_some`: an entry that was not made must not leave.
        entered.then(|| Shared(self))
    }

    /// Enters the gate to read messages, or gives up: a program that is stopped (by a signal, a
    /// debugger) just while its helper is inside keeps it until it is continued, or relieved.
    pub fn exclusive_within(&self, patience: Duration) -> Result<Exclusive<'_>, Abandoned> {
        // Nobody is inside nearly always: then nobody looks at a clock.
        let began = LazyCell::new(Instant::now);
        let nap = (patience.as_nanos() as u64).min(NAP_NS);
        let give_up = || self.is_dead_or_gone() || began.elapsed() >= patience;
        self.channel.gate().enter_exclusive(nap, give_up)?;
        if let Err(abandoned) = self.channel.helper_gate().close(nap, give_up) {
            self.channel.gate().leave_exclusive();
            return Err(abandoned);
        }
        Ok(Exclusive(self))
    }
}
