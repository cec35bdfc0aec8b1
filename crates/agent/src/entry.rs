//! Where a thread enters the library in a program that no loader brought it into: a static one, or one that runs
//! already.
//!
//! The supervisor stops a thread of the program by ptrace, maps the image, relocates it, and lets the thread run from the
//! image's entry (its ELF header names it) on a stack of its own, with all signals blocked. At the trap, the
//! register that functions return numbers in has the result of [`enter`]; the supervisor puts the registers back.

use crate::start::{is_sandboxed, start};
use crate::state::REFUSED;

/// Starts the helper, as the loader's call does. There is nothing to tell the program's C library, if it has one: forks
/// are seen only where the kernel reports them.
extern "C" fn enter() -> u32 {
    if is_sandboxed() {
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
