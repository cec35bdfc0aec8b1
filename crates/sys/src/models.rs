//! Loom models of the gate: each interleaving of two or three threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p memfold-sys --lib`

use crate::gate::{Gate, HelperGate};
use crate::sync::AtomicU32;
use core::sync::atomic::Ordering;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A nap that ends when the thread is woken, and one that ends at once.
const UNTIL_WOKEN: u64 = 1;
const AT_ONCE: u64 = 0;

/// What both gates protect is a page: loom reports accesses that are not ordered.
struct World {
    gate: Gate,
    helper_gate: HelperGate,
    /// As in the channel.
    forking: AtomicU32,
    page: UnsafeCell<u32>,
}

// SAFETY: loom checks that accesses to the page are ordered, and everything else is `Sync`.
unsafe impl Sync for World {}
// SAFETY: it holds no state of a thread.
unsafe impl Send for World {}

impl World {
    fn read(&self) {
        // SAFETY: loom panics if this is not ordered with every write.
        self.page.with(|page| unsafe {
            let _ = *page;
        });
    }

    fn write(&self) {
        // SAFETY: loom panics if this is not ordered with every other access.
        self.page.with_mut(|page| unsafe { *page += 1 });
    }

    fn share(&self) {
        let entered = self.gate.enter_shared(UNTIL_WOKEN, || false);
        entered.expect("it does not give up");
        self.read();
        self.gate.leave_shared();
    }

    fn be_alone(&self) {
        let entered = self.gate.enter_exclusive(UNTIL_WOKEN, || false);
        entered.expect("it does not give up");
        self.write();
        self.gate.leave_exclusive();
    }

    /// Gives up where it would wait.
    fn try_to_be_alone(&self) {
        if self.gate.enter_exclusive(AT_ONCE, || true).is_ok() {
            self.write();
            self.gate.leave_exclusive();
        }
    }

    fn move_pages(&self) {
        let entered = self.helper_gate.enter(UNTIL_WOKEN, || false);
        entered.expect("it does not give up");
        self.write();
        self.helper_gate.leave();
    }

    fn close(&self) {
        let closed = self.helper_gate.close(UNTIL_WOKEN, || false);
        closed.expect("it does not give up");
    }
}

/// Each thread does its part in each order, preempted twice at most: more takes minutes with three threads. The first
/// thread does the last part.
fn model<const OTHERS: usize>(before: fn(&World), others: [fn(&World); OTHERS], own: fn(&World)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let world = Arc::new(World {
            gate: Gate::new(),
            helper_gate: HelperGate::new(),
            forking: AtomicU32::new(0),
            page: UnsafeCell::new(0),
        });
        before(&world);
        let others = others.map(|part| {
            let world = Arc::clone(&world);
            thread::spawn(move || part(&world))
        });
        own(&world);
        for other in others {
            other.join().expect("no thread panics");
        }
    });
}

fn nothing(_: &World) {}

fn enter(world: &World) {
    assert!(world.gate.try_enter_shared());
}

fn read_and_leave(world: &World) {
    world.read();
    world.gate.leave_shared();
}

#[test]
fn one_that_shares_beside_one_that_is_alone() {
    model(nothing, [World::share], World::be_alone);
}

#[test]
fn two_that_are_alone_beside_one_that_shares() {
    model(enter, [World::be_alone, World::be_alone], read_and_leave);
}

#[test]
fn one_that_gives_up_beside_one_that_waits_to_be_alone() {
    model(
        enter,
        [World::try_to_be_alone, World::be_alone],
        read_and_leave,
    );
}

#[test]
fn one_that_gives_up_beside_one_that_waits_to_share() {
    model(
        enter,
        [World::try_to_be_alone, World::share],
        read_and_leave,
    );
}

/// Reads messages, which no page may be moved beside.
fn read_messages(world: &World) {
    world.close();
    world.write();
    world.helper_gate.open();
}

#[test]
fn the_helper_beside_a_thread_that_reads_messages() {
    fn moves(world: &World) {
        world.move_pages();
        world.move_pages();
    }
    model(nothing, [moves], read_messages);
}

/// What it leaves is not the gate that was closed since.
#[test]
fn a_helper_that_was_relieved_goes_on_beside_a_thread_that_reads_messages() {
    fn relieve(world: &World) {
        let entered = world.helper_gate.enter(UNTIL_WOKEN, || false);
        entered.expect("it does not give up");
        assert!(world.helper_gate.relieve());
    }
    fn goes_on(world: &World) {
        world.helper_gate.leave();
        world.move_pages();
    }
    model(relieve, [goes_on], read_messages);
}

/// The supervisor knows of a fork, or it happens after what was read was applied.
#[test]
fn a_fork_beside_a_thread_that_reads_messages() {
    fn forks(world: &World) {
        world.forking.fetch_add(1, Ordering::SeqCst);
        world.helper_gate.wait_open(UNTIL_WOKEN, || false);
        world.read();
    }
    model(nothing, [forks], |world| {
        world.close();
        if world.forking.load(Ordering::SeqCst) == 0 {
            world.write();
        }
        world.helper_gate.open();
    });
}
