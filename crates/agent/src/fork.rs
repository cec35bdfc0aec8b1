//! What the library does when a program forks through the C library.
//!
//! Where the kernel reports forks, the supervisor makes the child's address space when it reads the event, and
//! the child's handler asks for its number. Where it does not, the fork is prepared (`prepared.rs`).

use crate::arena::Arena;
use crate::rendezvous::starts_late;
use crate::start::{BEACON, FORK_STACK_TOP, WAITING_PROCESS, is_left_to_supervisor, start};
use crate::state::{
    Child, MANAGED, PREPARES, REFUSED, STRANDED, UNANNOUNCED, begin_to_join, channel, end_joining,
    has_left,
};
use crate::{helper, prepared, system};
use core::cell::Cell;
use core::sync::atomic::Ordering;
use memfold_sys::PAGE_SIZE;
use memfold_sys::futex::OWNER_DIED;
use memfold_sys::gate::NAP_NS;
use memfold_sys::hello::LOST;

/// The supervisor must know of a fork before it reads of it: the moment it does, the parent may be
/// gone, and what is staged in it. A read that began before the fork was announced is waited for.
pub extern "C" fn prepare() {
    /// Naps before the fork goes on in spite of a supervisor that reads all the time: its other threads
    /// change mappings without a pause. More delays such forks.
    const NAPS: u32 = 50;
    // SeqCst: see `UNANNOUNCED`.
    UNANNOUNCED.fetch_add(1, Ordering::SeqCst);
    let Some(channel) = channel() else {
        return;
    };
    channel.forking.fetch_add(1, Ordering::SeqCst);
    if !end_unannounced() {
        // A thread whose fork was announced has taken that one, and left its own.
        channel.forking.fetch_sub(1, Ordering::SeqCst);
    }
    if has_left() {
        return;
    }
    if channel.fork.prepared.load(Ordering::Relaxed) != 0 {
        prepared::prepare(channel);
        return;
    }
    let naps = Cell::new(0);
    channel.gate.wait_open(NAP_NS, || {
        naps.set(naps.get() + 1);
        naps.get() == NAPS || channel.alive.load(Ordering::Relaxed) & OWNER_DIED != 0
    });
}

/// Counts one fork less that no channel knows of. `false` if there is none.
fn end_unannounced() -> bool {
    let fewer = |forking: u32| forking.checked_sub(1);
    UNANNOUNCED
        .fetch_update(Ordering::SeqCst, Ordering::Relaxed, fewer)
        .is_ok()
}

pub extern "C" fn parent() {
    prepared::end_in_parent();
    // If another thread's fork was the unannounced one, the announcement of this one is its from now on.
    if end_unannounced() {
        return;
    }
    if let Some(channel) = channel() {
        // In a child of a fork within a fork, the channel knows of none.
        let fewer = |forking: u32| forking.checked_sub(1);
        let _ = channel
            .forking
            .fetch_update(Ordering::Release, Ordering::Relaxed, fewer);
    }
}

/// Called in a forked child before anything of the program's runs there.
pub extern "C" fn child() {
    UNANNOUNCED.store(0, Ordering::Relaxed);
    let Child::ToStart { may_call } = prepared::end_in_child() else {
        return;
    };
    if has_left() {
        return;
    }
    let beacon = BEACON.load(Ordering::Acquire);
    if !may_call && system::is_filtered() {
        // Whatever a helper needs may be forbidden, on pain of death. The supervisor serves the
        // child's faults all the same; its pages are not moved out. It makes itself known, which takes
        // no system call, before it has threads or children or changes its mappings.
        if beacon != 0 && look(beacon) == LOST {
            helper::fail_lost();
        }
        return;
    }
    unmap_inherited_stack();
    let is_prepared = PREPARES.load(Ordering::Relaxed) != 0;
    if is_prepared {
        // Not this fork, as nothing was managed when its parent decided.
        MANAGED.store(0, Ordering::Relaxed);
    }
    let knows_number = beacon != 0 && !is_prepared;
    let inherited = if knows_number { inherited(beacon) } else { 0 };
    if inherited == 0 && (starts_late() || is_left_to_supervisor()) {
        // As in a program that was just executed, nothing of it is anywhere else, and most end or execute one soon.
        BEACON.store(0, Ordering::Relaxed);
        WAITING_PROCESS.store(system::own_process(), Ordering::Relaxed);
    } else if knows_number {
        join(beacon, inherited);
    } else {
        start(0, None);
    }
}

/// The number of this forked child's address space, which it inherited: 0 if nothing was managed.
fn inherited(beacon: usize) -> u64 {
    let number = look(beacon);
    match number {
        LOST => helper::fail_lost(),
        // It may be this program's own beacon from now on, which is missing where forks are prepared. It is not registered,
        // so this raises no event.
        0 => drop(system::drop_pages(beacon, PAGE_SIZE)),
        _ => {}
    }
    number
}

/// Starts the helper of a child that inherited this beacon and number.
fn join(beacon: usize, inherited: u64) -> u32 {
    let started = start(inherited, Some(beacon));
    match started {
        REFUSED if inherited != 0 => {
            // No room for a helper, or no way to the supervisor. It serves the child all the same, as
            // one whose system calls are filtered, unless it is gone: then there is no answer.
            ask_again(beacon);
        }
        STRANDED if inherited != 0 => helper::fail_stranded(),
        _ => {}
    }
    started
}

/// Starts the helper of a child of a program that no loader brought the library into, so that no handler ran when it
/// forked. The child has run since, and may have threads and children.
pub fn join_late() -> u32 {
    let beacon = BEACON.load(Ordering::Acquire);
    if beacon == 0 || has_left() || !begin_to_join() {
        return REFUSED;
    }
    unmap_inherited_stack();
    let started = join(beacon, inherited(beacon));
    if started == REFUSED {
        end_joining();
    }
    started
}

/// Once, also where the child forks just now: its child must not unmap what it has mapped there itself.
fn unmap_inherited_stack() {
    let top = FORK_STACK_TOP.swap(0, Ordering::Relaxed);
    if top != 0 {
        Arena::unmap_inherited_stack(top);
    }
}

/// Asks the supervisor anew: the answer of the first time is still there. (Forked children get none of it. A drop raises an
/// event that this thread waits for, and the governor watches all threads until it is over.)
fn ask_again(beacon: usize) {
    let _ = system::drop_pages(beacon, PAGE_SIZE);
    look(beacon);
}

/// Asks the supervisor for the number of this forked child's address space, by a touch alone: 0 if nothing was managed.
fn look(beacon: usize) -> u64 {
    // SAFETY: the beacon is a mapped page of this library's, kept for children. If it is
    // registered, the read faults and the supervisor fills it.
    let number = unsafe { core::ptr::read_volatile(beacon as *const u64) };
    if number == 0 && MANAGED.load(Ordering::Relaxed) != 0 {
        helper::fail_orphaned();
    }
    number
}

#[cfg(feature = "standalone")]
core::arch::global_asm!(
    ".weak __register_atfork",
    ".weak pthread_atfork",
    ".pushsection .data.rel.ro.memfold, \"aw\"",
    ".balign 8",
    "memfold_register_atfork: .quad __register_atfork",
    "memfold_pthread_atfork: .quad pthread_atfork",
    ".popsection",
);

#[cfg(feature = "standalone")]
unsafe extern "C" {
    #[link_name = "memfold_register_atfork"]
    static REGISTER_ATFORK: usize;
    #[link_name = "memfold_pthread_atfork"]
    static PTHREAD_ATFORK: usize;
}

/// Asks the C library, whichever it is, to call the handlers around forks.
///
/// # Safety
/// The weak symbols must be null or the C library's functions.
#[cfg(feature = "standalone")]
pub unsafe fn register_handlers() {
    type Handler = Option<extern "C" fn()>;
    type Glibc = extern "C" fn(Handler, Handler, Handler, *const u8) -> i32;
    type Posix = extern "C" fn(Handler, Handler, Handler) -> i32;
    // SAFETY: the caller's promise; a null address is not called.
    unsafe {
        let glibc = core::ptr::read_volatile(&raw const REGISTER_ATFORK);
        let posix = core::ptr::read_volatile(&raw const PTHREAD_ATFORK);
        if glibc != 0 {
            let register: Glibc = core::mem::transmute(glibc);
            register(Some(prepare), Some(parent), Some(child), core::ptr::null());
        } else if posix != 0 {
            let register: Posix = core::mem::transmute(posix);
            register(Some(prepare), Some(parent), Some(child));
        }
    }
}

/// Built as an ordinary library (by `cargo test --workspace`) there is no loader to register with.
#[cfg(not(feature = "standalone"))]
///
/// # Safety
/// None is needed.
pub unsafe fn register_handlers() {
    let _: [extern "C" fn(); 3] = [prepare, parent, child];
}
