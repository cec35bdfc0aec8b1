//! The loader's call.

use crate::fork;
use crate::rendezvous::starts_late;
use crate::start::{
    EXECUTED, IS_LOADED, WAITING_PROCESS, is_left_to_supervisor, is_sandboxed, start,
};
use core::sync::atomic::Ordering;

/// Called by the loader before the program's own code.
extern "C" fn load() {
    // SAFETY: the symbols are weak; the addresses are null or the C library's functions of the
    // documented signatures, and `child` stays valid as the library is never unloaded.
    unsafe { fork::register_handlers() };
    if starts_late() {
        // Without any system call: most programs end soon.
        WAITING_PROCESS.store(EXECUTED, Ordering::Relaxed);
    } else if !is_sandboxed() {
        if is_left_to_supervisor() {
            WAITING_PROCESS.store(EXECUTED, Ordering::Relaxed);
        } else {
            start(0, None);
        }
    }
    IS_LOADED.store(1, Ordering::Relaxed);
}

#[cfg(feature = "standalone")]
#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;
