//! Guards of an address space's gate, which give access to its page table.
//!
//! Nodes of the table are freed under the exclusive gate, so a reference to a node must not outlive a
//! guard: only guards give access to the table. The gate is in the supervisor's memory
//! (`memfold_sys::gate`), so no program can break its exclusion.

use crate::bugs::Bug;
use crate::page_table::PageTable;
use crate::supervised::space::AddressSpace;
use crate::time::Instant;
use memfold_sys::gate::{Abandoned, NAP_NS};
use std::cell::{LazyCell, UnsafeCell};
use std::ptr;
use std::time::Duration;

/// Longest wait for a gate. It is far above the time that a running helper is inside; longer delays what else the waiting
/// thread serves when a helper was stopped inside.
pub(crate) const GATE_PATIENCE: Duration = Duration::from_millis(10);
/// Between two looks whether a helper that is inside waits for its event to be read. A larger value delays each batch that
/// is carried off.
const CARRY_NAP_NS: u64 = 20_000;

/// Data that is accessible through a guard of the gate only.
#[derive(Default)]
pub(crate) struct Gated<T>(UnsafeCell<T>);

// SAFETY: shared references come from guards of both kinds, and a mutable one from a mutably borrowed
// `Exclusive`, during which no other guard exists.
unsafe impl<T: Send + Sync> Sync for Gated<T> {}

impl<T> Gated<T> {
    /// The data, for the owner of a unique reference.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

/// A guard of the gate, of either kind.
pub(crate) trait Inside {
    /// The page table.
    fn table(&self) -> &PageTable;

    /// Whether this is a guard of the gate of `space`. For debug assertions where a guard is passed
    /// along with its address space.
    fn is_of(&self, space: &AddressSpace) -> bool;
}

/// Guard of the shared gate, under which page states change by compare-and-swap. Leaves on drop.
pub(crate) struct Shared<'a>(&'a AddressSpace);

impl Inside for Shared<'_> {
    fn table(&self) -> &PageTable {
        // SAFETY: a mutable reference needs an `Exclusive`, which cannot exist while this guard does.
        unsafe { &*self.0.table.0.get() }
    }

    fn is_of(&self, space: &AddressSpace) -> bool {
        ptr::eq(self.0, space)
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.0.channel.gate().leave_shared();
    }
}

/// Guard of the exclusive gate, under which messages are read and events applied. Leaves on drop.
pub(crate) struct Exclusive<'a>(&'a AddressSpace);

impl Inside for Exclusive<'_> {
    fn table(&self) -> &PageTable {
        // SAFETY: this is the only guard, and a mutable reference borrows it mutably.
        unsafe { &*self.0.table.0.get() }
    }

    fn is_of(&self, space: &AddressSpace) -> bool {
        ptr::eq(self.0, space)
    }
}

impl Exclusive<'_> {
    /// The page table, to free nodes.
    pub(crate) fn table_mut(&mut self) -> &mut PageTable {
        // SAFETY: this is the only guard, and it is borrowed mutably.
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
    /// Enters the shared gate. Waits for threads of the supervisor only. `Err` if the address space is
    /// gone.
    pub(crate) fn shared(&self) -> Result<Shared<'_>, Abandoned> {
        let give_up = || self.is_dead_or_gone();
        self.channel.gate().enter_shared(NAP_NS, give_up)?;
        Ok(Shared(self))
    }

    /// Enters the shared gate, waiting at most `patience`: a thread that reads the messages of a program
    /// holds it for as long as the program's changes take. For threads that other programs need.
    pub(crate) fn shared_within(&self, patience: Duration) -> Result<Shared<'_>, Abandoned> {
        if let Some(gate) = self.try_shared() {
            return Ok(gate);
        }
        let began = Instant::now();
        let nap = (patience.as_nanos() as u64).min(NAP_NS);
        // The clock first: the kernel may not answer.
        let give_up = || began.elapsed() >= patience || self.is_dead_or_gone();
        self.channel.gate().enter_shared(nap, give_up)?;
        Ok(Shared(self))
    }

    /// Enters the shared gate, unless it is held exclusively at the moment.
    pub(crate) fn try_shared(&self) -> Option<Shared<'_>> {
        let entered = self.channel.gate().try_enter_shared();
        // `then_some` would construct, and drop, a guard even if the gate was not entered.
        if Bug::GateLeftUnentered.is_back() && !entered {
            drop(Shared(self));
        }
        entered.then(|| Shared(self))
    }

    /// Enters the exclusive gate, waiting at most `patience`: a program that is stopped while its
    /// helper is inside holds the gate until it continues or the gate is taken over.
    pub(crate) fn exclusive_within(&self, patience: Duration) -> Result<Exclusive<'_>, Abandoned> {
        // The gate is free nearly always; then the clock is not read.
        let began = LazyCell::new(Instant::now);
        let nap = (patience.as_nanos() as u64).min(NAP_NS);
        let give_up = || began.elapsed() >= patience || self.is_dead_or_gone();
        self.channel.gate().enter_exclusive(nap, give_up)?;
        if let Err(abandoned) = self.close_helper_gate(nap, give_up) {
            self.channel.gate().leave_exclusive();
            return Err(abandoned);
        }
        Ok(Exclusive(self))
    }

    fn close_helper_gate(&self, nap: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        let gate = self.channel.helper_gate();
        if !self.resources.carries() {
            return gate.close(nap, give_up);
        }
        loop {
            if self.awaits_read() {
                // What it was inside for is done, but for its event.
                gate.relieve();
            }
            if gate.close(CARRY_NAP_NS.min(nap), || true).is_ok() {
                return Ok(());
            }
            if give_up() {
                return Err(Abandoned);
            }
        }
    }
}
