//! Where a thread enters the library in a program that no loader brought it into: a static one, or one that runs
//! already.
//!
//! The supervisor stops a thread of the program by ptrace, maps the image, relocates it, and lets the thread run from the
//! image's entry (its ELF header names it) on a stack of its own, with all signals blocked. At the trap, `rax` has the
//! result of [`enter`], and all that the program can see of the thread's floating-point state is as it was; the
//! supervisor puts the other registers back.

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

// The stack is aligned to 16 bytes at the entry, as `fxsave64` and calls need it.
#[cfg(feature = "standalone")]
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
