//! From the loader's call, or a forked child's first moment, to a running helper.

use crate::arena::Arena;
use crate::state::{Handover, MANAGED, REFUSED, STRANDED, channel, make_note};
use crate::{helper, system};
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use memfold_sys::futex::{self, OWNER_DIED};
use memfold_sys::gate::NAP_NS;
use memfold_sys::hello::{Filters, LOST, PATCHED, RENDEZVOUS_MARK, Rendezvous, SOCKET_PATH_MAX};
use memfold_sys::{Errno, PAGE_SIZE};

/// What the supervisor writes into the image that it unpacks for the run: a [`Rendezvous`].
#[used]
static PATCHED_IN: [u8; PATCHED] = marked();

const fn marked() -> [u8; PATCHED] {
    let mut bytes = [0; PATCHED];
    let mut i = 0;
    while i < RENDEZVOUS_MARK.len() {
        bytes[i] = RENDEZVOUS_MARK[i];
        i += 1;
    }
    bytes
}

/// The beacon's address, inherited by children; 0 before the first helper ran.
static BEACON: AtomicUsize = AtomicUsize::new(0);

/// Reads what is in the loaded image (the compiler knows only the unpatched one).
fn rendezvous() -> Rendezvous {
    fn number<const N: usize>(offset: usize) -> [u8; N] {
        let place = (&raw const PATCHED_IN).cast::<u8>();
        // SAFETY: the callers name parts of a live static; bytes of any value are numbers.
        unsafe { core::ptr::read_volatile(place.add(SOCKET_PATH_MAX + offset).cast()) }
    }
    let path = (&raw const PATCHED_IN).cast();
    Rendezvous {
        // SAFETY: reads the first part of a live static.
        socket_path: unsafe { core::ptr::read_volatile(path) },
        filters: u32::from_ne_bytes(number(0)),
        user: u32::from_ne_bytes(number(4)),
        pid: i32::from_ne_bytes(number(8)),
        user_namespace: u64::from_ne_bytes(number(12)),
    }
}

/// Whether the program was executed under filters that the supervisor does not have: whatever a helper
/// needs may be forbidden, on pain of death. The look is by the loader's own system calls, which are
/// allowed, or the program would not have come so far.
fn is_sandboxed() -> bool {
    let of_supervisor = rendezvous().filters;
    match own_filters() {
        Ok(count) => count > of_supervisor,
        // No such file in its root: the filters cannot be counted.
        Err(_) => of_supervisor == 0 && system::is_filtered(),
    }
}

fn own_filters() -> Result<u32, Errno> {
    let mut filters = Filters::default();
    system::read_file(c"/proc/self/status", |part| filters.look(part))?;
    Ok(filters.count)
}

/// Starts a helper and waits until it is ready or has found that it cannot be. Returns [`READY`],
/// [`REFUSED`] or [`STRANDED`].
fn start(inherited: u64, inherited_beacon: Option<usize>) -> u32 {
    let rendezvous = rendezvous();
    if rendezvous.socket_path[0] != b'/' || system::is_emulated() {
        return REFUSED;
    }
    let (Ok(()), Ok(arena)) = (make_note(), Arena::map(inherited_beacon)) else {
        return REFUSED;
    };
    BEACON.store(arena.beacon, Ordering::Relaxed);
    let handover = Handover {
        arena,
        inherited,
        rendezvous,
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
        // (A refused helper may still be on its last instructions: its stack stays mapped.)
        arena.unmap();
        return REFUSED;
    }
    handover.state.load(Ordering::Acquire)
}

/// Called by the loader before the program's own code.
extern "C" fn load() {
    // SAFETY: the symbols are weak; the addresses are null or the C library's functions of the
    // documented signatures, and `child` stays valid as the library is never unloaded.
    unsafe { register_fork_handler() };
    if !is_sandboxed() {
        start(0, None);
    }
}

#[cfg(feature = "standalone")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

/// The supervisor must know of a fork before it reads of it: the moment it does, the parent may be
/// gone, and what is staged in it. A read that began before the fork was announced is waited for.
extern "C" fn prepare() {
    /// Naps before the fork goes on in spite of a supervisor that reads all the time: its other threads
    /// change mappings without a pause. More delays such forks.
    const NAPS: u32 = 50;
    let Some(channel) = channel() else {
        return;
    };
    channel.forking.fetch_add(1, Ordering::SeqCst);
    let naps = Cell::new(0);
    channel.gate.wait_open(NAP_NS, || {
        naps.set(naps.get() + 1);
        naps.get() == NAPS || channel.alive.load(Ordering::Relaxed) & OWNER_DIED != 0
    });
}

extern "C" fn parent() {
    if let Some(channel) = channel() {
        channel.forking.fetch_sub(1, Ordering::Release);
    }
}

/// Called in a forked child before anything of the program's runs there.
extern "C" fn child() {
    let beacon = BEACON.load(Ordering::Relaxed);
    if system::is_filtered() {
        // Whatever a helper needs may be forbidden, on pain of death. The supervisor serves the
        // child's faults all the same; its pages are not moved out. It makes itself known, which takes
        // no system call, before it has threads or children or changes its mappings.
        if beacon != 0 && look(beacon) == LOST {
            helper::fail_lost();
        }
        return;
    }
    if beacon == 0 {
        start(0, None);
        return;
    }
    let inherited = ask(beacon);
    if inherited == LOST {
        helper::fail_lost();
    }
    match start(inherited, Some(beacon)) {
        REFUSED if inherited != 0 => {
            // No room for a helper, or no way to the supervisor. It serves the child all the same, as
            // one whose system calls are filtered, unless it is gone: then there is no answer.
            ask(beacon);
        }
        STRANDED if inherited != 0 => helper::fail_stranded(),
        _ => {}
    }
}

/// Asks the supervisor for the number of this forked child's address space: 0 if nothing was managed.
fn ask(beacon: usize) -> u64 {
    let number = look(beacon);
    // Missing again, for the next request.
    let _ = system::drop_pages(beacon, PAGE_SIZE);
    number
}

/// The same, by a touch alone.
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

/// Asks the C library, whichever it is, to call [`child`] in forked children.
#[cfg(feature = "standalone")]
unsafe fn register_fork_handler() {
    type Handler = Option<extern "C" fn()>;
    type Glibc = extern "C" fn(Handler, Handler, Handler, *const u8) -> i32;
    type Posix = extern "C" fn(Handler, Handler, Handler) -> i32;
    // SAFETY: see `load`; a null address is not called.
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
unsafe fn register_fork_handler() {}
