//! Where a thread enters the library in a program that runs already: a static one, which no loader brought it into, one
//! that does without a helper as yet (`starts_late`), or the forked child of one that was attached.
//!
//! The supervisor stops a thread of the program by ptrace, maps and relocates the image where there is none, and lets the
//! thread run from the image's entry (its ELF header names it) on a stack of its own, with all signals blocked. At the trap, the
//! register that functions return numbers in has the result of [`enter`]; the supervisor puts the registers back.

use crate::fork::join_late;
use crate::start::{BEACON, EXECUTED, WAITING_PROCESS, is_sandboxed, start};
use crate::state::{IS_BROUGHT, REFUSED};
use crate::system;
use core::sync::atomic::Ordering;
use memfold_sys::hello::brought;

/// Starts the helper, as the loader's call does. Where no loader made that, there is nothing to tell the program's C
/// library, if it has one: forks are seen only where the kernel reports them, and children are sent here later.
extern "C" fn enter(how: u64) -> u32 {
    if how == brought::INHERITED {
        return if is_sandboxed() { REFUSED } else { join_late() };
    }
    let waiting = WAITING_PROCESS.load(Ordering::Relaxed);
    let may_start = match how {
        brought::BY_SUPERVISOR => true,
        // Else the loader has not called it, or not even relocated it.
        brought::BY_LOADER => waiting == EXECUTED,
        // Else it has the memory of another process, or a copy that no handler saw.
        _ => waiting == system::own_process(),
    };
    IS_BROUGHT.store(u32::from(how == brought::BY_SUPERVISOR), Ordering::Relaxed);
    if !may_start || BEACON.load(Ordering::Relaxed) != 0 || is_sandboxed() {
        return REFUSED;
    }
    start(0, None)
}

// The stack is aligned to 16 bytes at the entry, as `fxsave64` and calls need it. The supervisor keeps no floating-point
// state on x86-64: all that the program can see of it is as it was at the trap.
#[cfg(all(feature = "standalone", target_arch = "x86_64"))]
core::arch::global_asm!(
    ".globl memfold_entry",
    ".hidden memfold_entry",
    ".type memfold_entry, @function",
    "memfold_entry:",
    "sub rsp, 512",
    "fxsave64 [rsp]",
    "cld",
    "call {enter}",
    "fxrstor64 [rsp]",
    "int3",
    "ud2",
    enter = sym enter,
);

// The supervisor keeps all registers.
#[cfg(all(feature = "standalone", target_arch = "aarch64"))]
core::arch::global_asm!(
    ".globl memfold_entry",
    ".hidden memfold_entry",
    ".type memfold_entry, @function",
    "memfold_entry:",
    "bl {enter}",
    "brk #0",
    "udf #0",
    enter = sym enter,
);
