//! The gate of an address space: who may change its mappings while.
//!
//! A message read from a userfaultfd lets the program go on before the supervisor has acted on
//! it (a `REMOVE` is read, and the thread that called `madvise` drops the pages), and from that
//! moment a page copied in or moved out would be a page of the wrong time. So:
//!
//! * whoever **reads messages** holds the gate *exclusively*, from the read until every event in
//!   what was read has been applied to the page states;
//! * whoever **changes the program's pages** (copies in, moves out, registers) holds it *shared*,
//!   from the look at the page state to the new page state.
//!
//! Between the moment the kernel changes a mapping and the moment its event is read, the kernel
//! itself answers `EAGAIN` to every ioctl on that userfaultfd. Both together leave no moment at
//! which a page state and the mapping it describes disagree unnoticed.
//!
//! The gate lies in memory shared with the program, because its helper thread is one of those
//! that change pages. A program may be stopped while its helper is inside, die there, or scribble
//! over the gate: whoever waits says when it gives up.

use crate::futex;
use core::sync::atomic::{AtomicU32, Ordering};

/// Writer present.
const EXCLUSIVE: u32 = 1 << 31;
/// A writer waits: newcomers stay out, so that messages are read soon.
const PENDING: u32 = 1 << 30;
/// The program's helper is inside, shared. A bit of its own, so that entering, leaving and being
/// relieved are one step each: it can be stopped between any two.
const HELPER: u32 = 1 << 29;
/// How many others are inside, shared.
const COUNT: u32 = HELPER - 1;

/// How long one wait lasts, in nanoseconds, before `give_up` is asked again, where the caller has
/// no hurry.
pub const NAP_NS: u64 = 20_000_000;

/// A reader-writer lock of one word for use between processes. All zero is "open".
#[repr(C)]
pub struct Gate {
    state: AtomicU32,
    /// Changes at each release that somebody may wait for.
    turn: AtomicU32,
    waiters: AtomicU32,
}

/// The gate could not be had: `give_up` said so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abandoned;

impl Gate {
    /// An open gate.
    pub const fn new() -> Gate {
        Gate {
            state: AtomicU32::new(0),
            turn: AtomicU32::new(0),
            waiters: AtomicU32::new(0),
        }
    }

    /// Enters to change pages. `give_up` is asked every `nap_ns` while waiting, and whenever the gate
    /// was left meanwhile.
    pub fn enter_shared(&self, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        self.enter(1, nap_ns, give_up)
    }

    /// The same for the program's helper, of which there is one.
    pub fn enter_as_helper(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        self.enter(HELPER, nap_ns, give_up)
    }

    fn enter(&self, share: u32, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & (EXCLUSIVE | PENDING) == 0 {
                // Acquire: what the last exclusive holder did to the page states is seen.
                if self
                    .state
                    .compare_exchange_weak(
                        state,
                        state + share,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok()
                {
                    return Ok(());
                }
                continue;
            }
            let blocked = |state| state & (EXCLUSIVE | PENDING) != 0;
            self.sleep(blocked, nap_ns, &give_up)?;
        }
    }

    /// Leaves after [`Gate::enter_shared`].
    pub fn leave_shared(&self) {
        // Release: the page states written inside are seen by the next exclusive holder.
        let state = self.state.fetch_sub(1, Ordering::Release) - 1;
        if state & (COUNT | HELPER) == 0 && state & PENDING != 0 {
            self.notify();
        }
    }

    /// Leaves after [`Gate::enter_as_helper`], unless relieved meanwhile.
    pub fn leave_as_helper(&self) {
        // Release: as in `leave_shared`.
        let state = self.state.fetch_and(!HELPER, Ordering::Release);
        if state & HELPER != 0 && state & COUNT == 0 && state & PENDING != 0 {
            self.notify();
        }
    }

    /// Takes over the share of a helper that was stopped inside: the caller leaves
    /// ([`Gate::leave_shared`]) in its place. `false` if it is not inside.
    pub fn relieve_helper(&self) -> bool {
        let take_over = |state| (state & HELPER != 0).then_some((state & !HELPER) + 1);
        // Acquire: what the helper did inside is seen. Its own leaving changes nothing any more.
        self.state
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, take_over)
            .is_ok()
    }

    /// Enters to read messages, alone. `give_up` is asked as by [`Gate::enter_shared`].
    pub fn enter_exclusive(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & (EXCLUSIVE | HELPER | COUNT) == 0 {
                // Taking the gate clears PENDING; writers that still wait set it again.
                if self
                    .state
                    .compare_exchange_weak(state, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    return Ok(());
                }
                continue;
            }
            if state & PENDING == 0 && state & EXCLUSIVE == 0 {
                let _ = self.state.compare_exchange_weak(
                    state,
                    state | PENDING,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                continue;
            }
            let blocked = |state| state & (EXCLUSIVE | HELPER | COUNT) != 0;
            if let Err(abandoned) = self.sleep(blocked, nap_ns, &give_up) {
                self.state.fetch_and(!PENDING, Ordering::Relaxed);
                self.notify();
                return Err(abandoned);
            }
        }
    }

    /// Leaves after [`Gate::enter_exclusive`].
    pub fn leave_exclusive(&self) {
        self.state.fetch_and(!EXCLUSIVE, Ordering::Release);
        self.notify();
    }

    fn notify(&self) {
        // SeqCst on both sides: either the waiter sees the new state, or this sees the waiter.
        self.turn.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            futex::wake_all(&self.turn);
        }
    }

    fn sleep(
        &self,
        blocked: impl Fn(u32) -> bool,
        nap_ns: u64,
        give_up: &impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        for _ in 0..50 {
            if !blocked(self.state.load(Ordering::Relaxed)) {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let turn = self.turn.load(Ordering::SeqCst);
        let mut result = Ok(());
        if blocked(self.state.load(Ordering::SeqCst)) {
            let _ = futex::wait(&self.turn, turn, Some(nap_ns));
            if give_up() {
                result = Err(Abandoned);
            }
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: fn() -> bool = || true;

    fn can_be_had_alone(gate: &Gate) -> bool {
        let entered = gate.enter_exclusive(1000, AT_ONCE).is_ok();
        if entered {
            gate.leave_exclusive();
        }
        entered
    }

    #[test]
    fn a_helper_keeps_writers_out_until_it_leaves() {
        let gate = Gate::new();
        gate.enter_as_helper(1000, AT_ONCE).unwrap();
        assert!(!can_be_had_alone(&gate));
        gate.enter_shared(1000, AT_ONCE).unwrap();
        gate.leave_as_helper();
        assert!(!can_be_had_alone(&gate), "another is inside");
        gate.leave_shared();
        assert!(can_be_had_alone(&gate));
        assert!(!gate.relieve_helper(), "it is not inside");
    }

    #[test]
    fn a_relieved_helper_is_left_for_once() {
        let gate = Gate::new();
        gate.enter_as_helper(1000, AT_ONCE).unwrap();
        assert!(gate.relieve_helper());
        assert!(!gate.relieve_helper());
        assert!(!can_be_had_alone(&gate), "its share is the reliever's now");
        gate.leave_shared();
        gate.enter_exclusive(1000, AT_ONCE).unwrap();
        // It goes on, whoever is inside by then.
        gate.leave_as_helper();
        assert!(!can_be_had_alone(&gate));
        gate.leave_exclusive();
        gate.enter_as_helper(1000, AT_ONCE).unwrap();
        assert!(!can_be_had_alone(&gate));
        gate.leave_as_helper();
        assert!(can_be_had_alone(&gate));
    }
}
