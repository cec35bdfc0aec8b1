//! The gate of an address space: a reader-writer lock between events and page changes.
//!
//! A message read from a userfaultfd lets the program go on before the supervisor has acted on
//! it (a `REMOVE` is read, and the thread that called `madvise` drops the pages), and from that
//! moment a page copied in or moved out would be a page of the wrong time. So:
//!
//! * a thread that **reads messages** holds the gate *exclusively*, from the read until every event in
//!   what was read has been applied to the page states;
//! * a thread that **changes the program's pages** (copies in, moves out, registers) holds it *shared*,
//!   from the look at the page state to the new page state.
//!
//! Between the moment the kernel changes a mapping and the moment its event is read, the kernel
//! itself answers `EAGAIN` to every ioctl on that userfaultfd. Both together leave no moment at
//! which a page state and the mapping it describes disagree unnoticed.
//!
//! The gate has two leaves. [`Gate`] is the supervisor's own: a reader-writer lock in its own memory,
//! which no program can reach, so that what it protects is protected whatever a program does.
//! [`HelperGate`] lies in the channel, as the program's helper thread moves pages, too. A thread that enters
//! exclusively takes the first and then closes the second; the helper takes the second alone. A
//! program may be stopped while its helper is inside, die there, or scribble over the word: only the
//! thread that closes it waits for it, and decides when to give up.

use crate::sync::{self, AtomicU32};
use core::sync::atomic::Ordering;

/// Writer present.
const EXCLUSIVE: u32 = 1 << 31;
/// A writer waits: newcomers stay out, so that messages are read soon.
const PENDING: u32 = 1 << 30;
/// How many are inside, shared.
const COUNT: u32 = PENDING - 1;
/// The program's helper is inside. A bit of its own, so that entering, leaving and being relieved are
/// one step each: it can be stopped between any two.
const HELPER: u32 = 1 << 29;

/// How long one wait lasts, in nanoseconds, before `give_up` is asked again, where the caller has
/// no hurry.
pub const NAP_NS: u64 = 20_000_000;

/// A reader-writer lock among the supervisor's threads. All zero is "open".
#[derive(Debug)]
pub struct Gate {
    state: AtomicU32,
    queue: Queue,
}

/// What the program's helper enters, and the supervisor closes before it reads messages. All zero is
/// "open". Nothing in it is trusted.
#[repr(C)]
#[derive(Debug)]
pub struct HelperGate {
    state: AtomicU32,
    queue: Queue,
}

/// The threads that wait for a change.
#[repr(C)]
#[derive(Debug)]
struct Queue {
    /// Changes at each release that a thread may wait for.
    turn: AtomicU32,
    waiters: AtomicU32,
}

/// The gate was not entered: `give_up` returned true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abandoned;

impl Gate {
    /// An open gate.
    pub fn new() -> Gate {
        Gate {
            state: AtomicU32::new(0),
            queue: Queue::new(),
        }
    }

    /// Enters to change pages, or looks at them. `give_up` is asked every `nap_ns` while waiting, and
    /// whenever the gate was left meanwhile.
    pub fn enter_shared(&self, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        while !self.try_enter_shared() {
            let blocked = || self.state.load(Ordering::SeqCst) & (EXCLUSIVE | PENDING) != 0;
            self.queue.sleep(blocked, nap_ns, &give_up)?;
        }
        Ok(())
    }

    /// The same if no other thread holds it exclusively or waits to: never waits.
    pub fn try_enter_shared(&self) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & (EXCLUSIVE | PENDING) == 0 {
            // Acquire: what the last exclusive holder did to the page states is seen.
            match self.state.compare_exchange_weak(
                state,
                state + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Leaves after [`Gate::enter_shared`].
    pub fn leave_shared(&self) {
        // Release: the page states written inside are seen by the next exclusive holder.
        let state = self.state.fetch_sub(1, Ordering::Release) - 1;
        if state & COUNT == 0 && state & PENDING != 0 {
            self.queue.notify();
        }
    }

    /// Enters to read messages, alone. `give_up` is asked as by [`Gate::enter_shared`].
    pub fn enter_exclusive(
        &self,
        nap_ns: u64,
        give_up: impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & (EXCLUSIVE | COUNT) == 0 {
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
            if state & (PENDING | EXCLUSIVE) == 0 {
                let _ = self.state.compare_exchange_weak(
                    state,
                    state | PENDING,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                continue;
            }
            let blocked = || {
                let state = self.state.load(Ordering::SeqCst);
                // Another one that gave up has cleared it, and no thread that leaves would wake this one.
                let is_announced = state & PENDING != 0;
                state & EXCLUSIVE != 0 || state & COUNT != 0 && is_announced
            };
            if let Err(abandoned) = self.queue.sleep(blocked, nap_ns, &give_up) {
                self.state.fetch_and(!PENDING, Ordering::Relaxed);
                self.queue.notify();
                return Err(abandoned);
            }
        }
    }

    /// Leaves after [`Gate::enter_exclusive`].
    pub fn leave_exclusive(&self) {
        self.state.fetch_and(!EXCLUSIVE, Ordering::Release);
        self.queue.notify();
    }
}

impl HelperGate {
    /// An open gate.
    pub fn new() -> HelperGate {
        HelperGate {
            state: AtomicU32::new(0),
            queue: Queue::new(),
        }
    }

    /// For the helper, of which there is one: enters to move pages.
    pub fn enter(&self, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & (EXCLUSIVE | PENDING) == 0 {
                // Acquire: the event count of the thread that closed it last is seen.
                if self
                    .state
                    .compare_exchange_weak(
                        state,
                        state | HELPER,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok()
                {
                    return Ok(());
                }
                continue;
            }
            let blocked = || self.state.load(Ordering::SeqCst) & (EXCLUSIVE | PENDING) != 0;
            self.queue.sleep(blocked, nap_ns, &give_up)?;
        }
    }

    /// Whether the helper is inside and was not relieved since it entered.
    pub fn is_inside(&self) -> bool {
        self.state.load(Ordering::SeqCst) & HELPER != 0
    }

    /// For the helper: leaves, unless relieved meanwhile.
    pub fn leave(&self) {
        // Release: what was moved is seen by the thread that closes it next.
        let state = self.state.fetch_and(!HELPER, Ordering::Release);
        if state & HELPER != 0 && state & PENDING != 0 {
            self.queue.notify();
        }
    }

    /// For a thread of the program that has just announced a fork: waits until the supervisor is not
    /// reading messages. The next time it closes the gate, it sees the announcement: both are `SeqCst`.
    pub fn wait_open(&self, nap_ns: u64, give_up: impl Fn() -> bool) {
        let blocked = || self.state.load(Ordering::SeqCst) & EXCLUSIVE != 0;
        while blocked() && self.queue.sleep(blocked, nap_ns, &give_up).is_ok() {}
    }

    /// For the supervisor, which holds its own gate exclusively: keeps the helper out. `give_up` is asked
    /// whatever the program does to the word.
    pub fn close(&self, nap_ns: u64, give_up: impl Fn() -> bool) -> Result<(), Abandoned> {
        /// Tries before `give_up` is asked: the helper changes the word twice in a command.
        const TRIES: u32 = 16;
        for round in 0u64.. {
            for _ in 0..TRIES {
                let state = self.state.load(Ordering::Relaxed);
                if state & HELPER != 0 {
                    break;
                }
                // SeqCst: see `wait_open`.
                if self
                    .state
                    .compare_exchange(state, EXCLUSIVE, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
                {
                    return Ok(());
                }
            }
            self.state.fetch_or(PENDING, Ordering::Relaxed);
            let blocked = || self.state.load(Ordering::SeqCst) & HELPER != 0;
            let again = round > 0;
            if again && give_up() || self.queue.sleep(blocked, nap_ns, &give_up).is_err() {
                break;
            }
        }
        self.state.fetch_and(!PENDING, Ordering::Relaxed);
        self.queue.notify();
        Err(Abandoned)
    }

    /// Lets the helper in again.
    pub fn open(&self) {
        self.state.fetch_and(!EXCLUSIVE, Ordering::Release);
        self.queue.notify();
    }

    /// For the supervisor, which is in its own gate: takes the place of a helper that was stopped inside.
    /// `false` if it is not inside. Its own leaving changes nothing any more.
    pub fn relieve(&self) -> bool {
        // What the helper did inside is seen; SeqCst: and it sees this before the event that it waits for is read.
        self.state.fetch_and(!HELPER, Ordering::SeqCst) & HELPER != 0
    }
}

impl Queue {
    fn new() -> Queue {
        Queue {
            turn: AtomicU32::new(0),
            waiters: AtomicU32::new(0),
        }
    }

    fn notify(&self) {
        // SeqCst on both sides: either the waiter sees the new state, or this sees the waiter.
        self.turn.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            sync::wake_all(&self.turn);
        }
    }

    fn sleep(
        &self,
        blocked: impl Fn() -> bool,
        nap_ns: u64,
        give_up: &impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        const LOOKS: u32 = if cfg!(loom) { 0 } else { 50 };
        for _ in 0..LOOKS {
            if !blocked() {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let turn = self.turn.load(Ordering::SeqCst);
        let mut result = Ok(());
        if blocked() {
            let _ = sync::wait(&self.turn, turn, Some(nap_ns));
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

impl Default for HelperGate {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
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

    fn can_be_closed(gate: &HelperGate) -> bool {
        let closed = gate.close(1000, AT_ONCE).is_ok();
        if closed {
            gate.open();
        }
        closed
    }

    #[test]
    fn many_share_and_one_is_alone() {
        let gate = Gate::new();
        gate.enter_shared(1000, AT_ONCE).unwrap();
        assert!(gate.try_enter_shared());
        gate.leave_shared();
        assert!(!can_be_had_alone(&gate), "another is inside");
        gate.leave_shared();
        gate.enter_exclusive(1000, AT_ONCE).unwrap();
        assert!(!gate.try_enter_shared());
        assert!(gate.enter_shared(1000, AT_ONCE).is_err());
        assert!(!can_be_had_alone(&gate));
        gate.leave_exclusive();
        assert!(gate.try_enter_shared());
    }

    #[test]
    fn a_helper_keeps_the_gate_open_until_it_leaves() {
        let gate = HelperGate::new();
        gate.enter(1000, AT_ONCE).unwrap();
        assert!(!can_be_closed(&gate));
        gate.leave();
        gate.close(1000, AT_ONCE).unwrap();
        assert!(gate.enter(1000, AT_ONCE).is_err());
        gate.open();
        gate.enter(1000, AT_ONCE).unwrap();
        gate.leave();
        assert!(!gate.relieve(), "it is not inside");
    }

    #[cfg(feature = "std")]
    #[test]
    fn a_fork_waits_for_a_read_that_may_not_have_seen_it() {
        let gate = HelperGate::new();
        gate.wait_open(1000, || unreachable!("it is open"));
        gate.close(1000, AT_ONCE).unwrap();
        let asked = core::cell::Cell::new(0);
        gate.wait_open(1000, || asked.replace(asked.get() + 1) == 2);
        assert_eq!(asked.get(), 3, "closed until it gives up");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.wait_open(NAP_NS, || false));
            gate.open();
            waits.join().unwrap();
        });
    }

    #[test]
    fn a_relieved_helper_is_left_for_once() {
        let gate = HelperGate::new();
        gate.enter(1000, AT_ONCE).unwrap();
        assert!(gate.relieve());
        assert!(!gate.relieve());
        gate.close(1000, AT_ONCE).unwrap();
        // It goes on, whatever thread is inside by then.
        gate.leave();
        assert!(gate.enter(1000, AT_ONCE).is_err());
        gate.open();
        gate.enter(1000, AT_ONCE).unwrap();
        assert!(!can_be_closed(&gate));
        gate.leave();
        assert!(can_be_closed(&gate));
    }

    #[cfg(feature = "std")]
    #[test]
    fn no_value_of_the_word_is_waited_for_without_an_end() {
        let gate = HelperGate::new();
        for bit in 0..32 {
            gate.state.store(1 << bit, Ordering::Relaxed);
            assert_eq!(can_be_closed(&gate), 1 << bit != HELPER, "bit {bit}");
        }
        // A thread of the program's that writes without a pause.
        let stop = core::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut word = 1u32;
                while !stop.load(Ordering::Relaxed) {
                    word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    gate.state.store(word, Ordering::Relaxed);
                    gate.queue.turn.store(word, Ordering::Relaxed);
                    gate.queue.waiters.store(word, Ordering::Relaxed);
                }
            });
            for _ in 0..2000 {
                can_be_closed(&gate);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
