//! The handler of SIGBUS and SIGSEGV: whether a fault is on a region, and a stack to serve it on.
//!
//! Other faults go to the handler that the program had installed before. A handler that is installed
//! later passes faults on by [`handle_fault`], or the handler here is put above it again by [`reinstall`].

mod chain;

use super::area::{Area, Served};
use super::registry;
use super::remote_queue::PAUSE;
use super::worker::{self, Worker};
use crate::sync::lock;
use chain::{Chain, LEVELS};
use memfold_sys::fork::PerProcess;
use memfold_sys::signal::{self, Handler, Info};
use memfold_sys::thread;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// SIGBUS: userfaultfd raises it for a missing page.
pub(super) const MISSING: i32 = libc::SIGBUS;
/// SIGSEGV: the kernel raises it for an inaccessible page.
pub(super) const PROTECTED: i32 = libc::SIGSEGV;

static CHAINS: [Chain; 2] = [Chain::new(), Chain::new()];
static INSTALLING: PerProcess<Mutex<()>> = PerProcess::new();

fn installing() -> MutexGuard<'static, ()> {
    lock(INSTALLING.get_or_make(Mutex::default))
}

fn chain(signal: i32) -> &'static Chain {
    &CHAINS[usize::from(signal == PROTECTED)]
}

/// Installs the handler for a signal, once for the process.
pub(super) fn install(signal: i32) -> io::Result<()> {
    let _installing = installing();
    let chain = chain(signal);
    // A forked child may have reset all signals, and so may a library that handled this one for a
    // while.
    if chain.levels() == 0 || signal::has_no_handler(signal) {
        // A fault of another thread in between finds no previous handler and is tried again.
        chain.keep(0, signal::install(signal, HANDLERS[0])?);
    }
    Ok(())
}

/// Puts the handlers that limits of this process have installed above those that the program, or a library of it, has
/// installed since. Faults that are on no region go to these, and from there to what was installed first. To be called
/// after the program has installed or removed a handler of SIGBUS or SIGSEGV that passes no faults on.
///
/// # Errors
/// If the kernel refuses.
pub fn reinstall() -> io::Result<()> {
    let _installing = installing();
    for signal in [MISSING, PROTECTED] {
        let chain = chain(signal);
        if chain.levels() == 0 || is_installed(signal) {
            continue;
        }
        let known = signal::installed(signal).and_then(|found| chain.level_above(found));
        let level = known.unwrap_or(chain.levels());
        if let Some(handler) = HANDLERS.get(level) {
            chain.keep(level, signal::install(signal, *handler)?);
        }
    }
    Ok(())
}

/// Whether an access to a region of a parent is explained.
static EXPLAINING: AtomicBool = AtomicBool::new(false);

const EXPLANATION: &str = "this process was forked from one that has memfold regions or arrays, and \
accessed one of them; a forked child does not inherit them: pass it what it needs, or start it without \
fork (in Python: multiprocessing.set_start_method(\"spawn\"))";

/// Ends this process with a message when it accesses a region of one that it was forked from, if the
/// region's addresses are inaccessible.
pub(super) fn explain_inherited() -> io::Result<()> {
    install(PROTECTED)?;
    EXPLAINING.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether the kernel calls this handler for a signal.
pub(super) fn is_installed(signal: i32) -> bool {
    let is_installed = |handler: &Handler| signal::is_installed(signal, *handler);
    HANDLERS.iter().any(is_installed)
}

/// One for each level of a [`Chain`].
static HANDLERS: [Handler; LEVELS] = [
    on_fault::<0>,
    on_fault::<1>,
    on_fault::<2>,
    on_fault::<3>,
    on_fault::<4>,
    on_fault::<5>,
    on_fault::<6>,
    on_fault::<7>,
];

extern "C" fn on_fault<const LEVEL: usize>(
    signal: i32,
    info: *mut Info,
    context: *mut libc::c_void,
) {
    signal::keep_errno(|| {
        // SAFETY: the arguments are the kernel's.
        unsafe {
            // Regions are not executable: a jump into one would fault for ever.
            let executes = signal == PROTECTED && signal::is_fetch(context);
            if executes || !serve_fault(info) {
                chain(signal).pass_on(LEVEL, (signal, info, context));
            }
        }
    });
}

struct Fault<'a> {
    area: &'a Arc<Area>,
    address: usize,
    worker: &'a mut Worker,
    served: Served,
}

/// Serves a fault from a SIGBUS or SIGSEGV handler that the program installed after it made its first
/// engine. Returns `true` if the fault was on a region: the handler must return then, so that the access
/// is repeated. Returns `false` if it was not.
///
/// Preserves `errno`, and blocks all signals meanwhile.
///
/// # Safety
/// `info` is the one that the kernel passed to the handler.
pub unsafe fn handle_fault(info: *const Info) -> bool {
    // The program's handler may leave signals unblocked. The handler of one that arrives now would run on
    // the alternate stack, which looks unused while this thread is on a worker's stack.
    let _blocked = signal::block_all();
    // SAFETY: the caller's promise.
    signal::keep_errno(|| unsafe { serve_fault(info) })
}

/// [`handle_fault`] with all signals blocked; may change `errno`.
///
/// # Safety
/// As above.
unsafe fn serve_fault(info: *const Info) -> bool {
    // SAFETY: the caller's promise.
    let Some((number, address)) = (unsafe { signal::fault(info) }) else {
        return false;
    };
    // SAFETY: the interrupted code is accessing this address. If it is in a region, the region is not
    // dropped meanwhile: Rust borrows it, and C programs are told to keep it.
    let Some(area) = (unsafe { registry::find(address) }) else {
        return false;
    };
    let expected = if area.blocks.is_some() {
        PROTECTED
    } else {
        MISSING
    };
    if !area.ledger.owner.is_here() {
        if EXPLAINING.load(Ordering::Relaxed) {
            signal::die(&[EXPLANATION]);
        }
        return false;
    }
    if number != expected {
        return false;
    }
    let mut worker = worker::take();
    let top = worker.stack_top();
    let mut fault = Fault {
        area: &area,
        address,
        worker: &mut worker,
        served: Served::Done,
    };
    // SAFETY: the stack is that of the worker, which this thread holds until the end of this function;
    // `serve` aborts rather than unwinds.
    unsafe { signal::call_on_stack(top, serve, (&raw mut fault).cast()) };
    let served = fault.served;
    drop(worker);
    chain(number).note_served();
    if served != Served::Done {
        // The access is repeated.
        thread::nap(PAUSE);
    }
    true
}

extern "C" fn serve(argument: *mut libc::c_void) {
    // SAFETY: `serve_fault` passes its own fault, and does not use it meanwhile.
    let fault = unsafe { &mut *argument.cast::<Fault<'_>>() };
    let thread = thread::fast_number();
    fault.served = fault
        .area
        .server
        .serve(fault.area, fault.address, thread, fault.worker);
}
