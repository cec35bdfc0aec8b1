//! From a program's first moment, or a forked child's, to a running helper.

use crate::arena::Arena;
use crate::message::tell;
use crate::rendezvous::{patched, rendezvous};
use crate::state::{Handover, REFUSED, make_note};
use crate::{helper, system};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use memfold_sys::futex;
use memfold_sys::hello::{FORKS_ALONE, Filters};
use memfold_sys::zygote::ZygoteSearch;
use memfold_sys::{Errno, PAGE_SIZE};

/// The beacon's address, inherited by children; 0 before the first helper ran.
pub static BEACON: AtomicUsize = AtomicUsize::new(0);

/// End of the stack on which this program's threads fork, where forks are prepared.
pub static FORK_STACK_TOP: AtomicUsize = AtomicUsize::new(0);

/// 1 once the loader has called the library, or the supervisor has brought it.
pub static IS_LOADED: AtomicU32 = AtomicU32::new(0);

/// Which process does without a helper as yet: [`EXECUTED`], or the PID of one that was forked; 0 if none does. A process
/// that shares this memory (the child of a `vfork`), or has a copy that no handler saw (of a raw `clone`), is neither.
pub static WAITING_PROCESS: AtomicU32 = AtomicU32::new(0);
/// The one that executed this program. It does not ask for its PID, as filters may forbid that.
pub const EXECUTED: u32 = u32::MAX;

/// Whether the program was executed under filters that the supervisor does not have: whatever a helper
/// needs may be forbidden, on pain of death. The look is by the loader's own system calls, which are
/// allowed, or the program would not have come so far.
pub fn is_sandboxed() -> bool {
    let of_supervisor = rendezvous().filters;
    match own_filters() {
        Ok(count) => count > of_supervisor,
        // No such file in its root: the filters cannot be counted.
        Err(_) => of_supervisor == 0 && system::is_filtered(),
    }
}

/// Whether this is a zygote, or was forked by one just now, and has told the supervisor so: no helper is started in it. A child
/// that runs on by another name gets one later, as a program that does without one does.
pub fn is_left_to_supervisor() -> bool {
    let mut search = ZygoteSearch::default();
    let looked = system::read_file(c"/proc/self/cmdline", |part| search.look(part));
    let is_zygote = looked.is_ok() && search.is_zygote();
    if is_zygote {
        let mask = system::block_signals();
        tell(FORKS_ALONE);
        system::restore_signals(mask);
    }
    is_zygote
}

fn own_filters() -> Result<u32, Errno> {
    let mut filters = Filters::default();
    system::read_file(c"/proc/self/status", |part| filters.look(part))?;
    Ok(filters.count)
}

/// Keeps the page of this library's statics a mapping of its own, which is too small to be managed: they are used
/// where no fault can be served. (Anonymous memory beside it may be merged with it otherwise.)
fn keep_statics_apart() {
    let page = system::page_of(BEACON.as_ptr() as usize);
    let _ = system::keep_from_dumps(page, PAGE_SIZE);
}

/// Starts a helper and waits until it is ready or has found that it cannot be. Returns [`READY`](crate::state::READY),
/// [`REFUSED`] or [`STRANDED`](crate::state::STRANDED).
pub fn start(inherited: u64, inherited_beacon: Option<usize>) -> u32 {
    let [first] = patched(0);
    if first != b'/' || system::is_emulated() {
        return REFUSED;
    }
    keep_statics_apart();
    let (Ok(()), Ok(arena)) = (make_note(), Arena::map(inherited_beacon)) else {
        return REFUSED;
    };
    // In this order: another thread may fork just now, and its child looks at the beacon first.
    let stack_before = FORK_STACK_TOP.swap(arena.fork_stack_top, Ordering::Relaxed);
    let beacon_before = BEACON.swap(arena.beacon, Ordering::AcqRel);
    let handover = Handover {
        arena,
        inherited,
        state: AtomicU32::new(0),
    };
    let mask = system::block_signals();
    // SAFETY: the stack is the arena's, fresh and large enough; `handover` lives until the
    // helper has set its state, which is waited for below.
    let started = unsafe { helper::spawn(arena.stack_top, &raw const handover) };
    if started {
        while handover.state.load(Ordering::Acquire) == 0 {
            let _ = futex::wait(&handover.state, 0, None);
        }
    }
    system::restore_signals(mask);
    if !started {
        // Before it is unmapped: a child that is forked now has one or the other.
        BEACON.store(beacon_before, Ordering::Release);
        FORK_STACK_TOP.store(stack_before, Ordering::Release);
        // (A refused helper may still be on its last instructions: its stack stays mapped.)
        arena.unmap();
        return REFUSED;
    }
    handover.state.load(Ordering::Acquire)
}
