//! The handler of SIGBUS and SIGSEGV: whether a fault is ours, and a stack to serve it on.
//!
//! The program's own handler, if it had one before, gets what is not ours. One that is installed
//! afterwards passes faults on by [`handle_fault`].

use super::area::Area;
use super::registry;
use super::worker::{self, Worker};
use memfold_sys::signal::{self, Info, Previous};
use memfold_sys::thread;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// SIGBUS: what userfaultfd raises for a missing page.
pub const MISSING: i32 = libc::SIGBUS;
/// SIGSEGV: what protected pages raise.
pub const PROTECTED: i32 = libc::SIGSEGV;

static PREVIOUS: [OnceLock<Previous>; 2] = [OnceLock::new(), OnceLock::new()];

fn previous(signal: i32) -> &'static OnceLock<Previous> {
    &PREVIOUS[usize::from(signal == PROTECTED)]
}

/// Installs the handler for a signal, once for the process.
pub fn install(signal: i32) -> io::Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let place = previous(signal);
    // A forked child may have reset all signals, as may whoever had a handler here for a while.
    if place.get().is_none() || signal::has_no_handler(signal) {
        // A fault of another thread in between finds no previous handler and is tried again.
        let found = signal::install(signal, on_fault)?;
        let _ = place.set(found);
    }
    Ok(())
}

/// Whether our handler is the one that the kernel calls for a signal.
pub fn is_installed(signal: i32) -> bool {
    signal::is_installed(signal, on_fault)
}

extern "C" fn on_fault(signal: i32, info: *mut Info, context: *mut libc::c_void) {
    signal::keep_errno(|| {
        // SAFETY: the arguments are the kernel's.
        unsafe {
            // Regions are not executable: a jump into one would be made again for ever.
            let executes = signal == PROTECTED && signal::is_fetch(context);
            if (executes || !serve_fault(info))
                && let Some(previous) = previous(signal).get()
            {
                previous.call(signal, info, context);
            }
        }
    });
}

struct Fault<'a> {
    area: &'a Arc<Area>,
    address: usize,
    worker: &'a mut Worker,
}

/// Serves the fault that a handler of SIGBUS or SIGSEGV was called for, if it is on a region:
/// `true` then, and the handler must return so that the access is made again. `false` if it is not
/// ours.
///
/// For programs that install a handler of their own after the first engine was made.
///
/// # Safety
/// `info` is what the kernel gave the handler.
pub unsafe fn handle_fault(info: *const Info) -> bool {
    // The other handler may leave signals unblocked; one that came now would find the alternate stack
    // unused, as this thread is on a worker's.
    let _blocked = signal::block_all();
    // SAFETY: the caller's promise.
    signal::keep_errno(|| unsafe { serve_fault(info) })
}

/// The same with all signals blocked; may change `errno`.
///
/// # Safety
/// As above.
unsafe fn serve_fault(info: *const Info) -> bool {
    // SAFETY: the caller's promise.
    let Some((number, address)) = (unsafe { signal::fault(info) }) else {
        return false;
    };
    // SAFETY: the interrupted code is using this address; if it belongs to a region, nobody drops
    // it meanwhile, as the region is borrowed (in Rust) or documented to be kept (in C).
    let Some(area) = (unsafe { registry::find(address) }) else {
        return false;
    };
    let ours = if area.protected.is_some() {
        PROTECTED
    } else {
        MISSING
    };
    if number != ours || !area.shared.owner.is_here() {
        return false;
    }
    let mut worker = worker::take();
    let top = worker.stack_top();
    let mut fault = Fault {
        area: &area,
        address,
        worker: &mut worker,
    };
    // SAFETY: the stack is the worker's, which is ours until it is dropped here; `serve` aborts
    // rather than unwind.
    unsafe { signal::call_on_stack(top, serve, (&raw mut fault).cast()) };
    true
}

extern "C" fn serve(argument: *mut libc::c_void) {
    // SAFETY: `handle_fault` passes its own fault, which nobody else uses meanwhile.
    let fault = unsafe { &mut *argument.cast::<Fault<'_>>() };
    let thread = thread::fast_number();
    fault
        .area
        .shared
        .serve(fault.area, fault.address, thread, fault.worker);
}
