//! Where a thread enters the library in a program that runs already: a static one, which no loader brought it into, one
//! that does without a helper as yet (`starts_late`), or the forked child of one that was attached.
//!
//! The supervisor stops a thread of the program by ptrace, maps and relocates the image where there is none, and lets the
//! thread run from the image's entry (its ELF header names it) on a stack of its own, with all signals blocked. At the trap, the
//! register that functions return numbers in has the result of [`enter`]; the supervisor puts the registers back.

use crate::fork::join_late;
use crate::start::{BEACON, EXECUTED, IS_LOADED, WAITING_PROCESS, is_sandboxed, start};
use crate::state::{HAS_FORK_SITES, IS_BROUGHT, REFUSED};
use crate::system;
use core::sync::atomic::Ordering;
use memfold_sys::hello::{TOO_EARLY, brought};

/// Starts the helper, as the loader's call does. Where no loader made that, there is nothing to tell the program's C
/// library, if it has one: the kernel reports forks, and children are sent here later, or the program's code was changed
/// where it forks (`fork_site.rs`).
extern "C" fn enter(how: u64) -> u32 {
    if how == brought::INHERITED {
        return if is_sandboxed() { REFUSED } else { join_late() };
    }
    if how == brought::BY_LOADER && IS_LOADED.load(Ordering::Relaxed) == 0 {
        return TOO_EARLY;
    }
    let waiting = WAITING_PROCESS.load(Ordering::Relaxed);
    let may_start = match how {
        brought::BY_SUPERVISOR | brought::WITH_FORK_SITES => true,
        // Else it has, or had, a helper, or may have none.
        brought::BY_LOADER => waiting == EXECUTED,
        // Else it has the memory of another process, or a copy that no handler saw.
        _ => waiting == system::own_process(),
    };
    IS_LOADED.store(1, Ordering::Relaxed);
    IS_BROUGHT.store(u32::from(how == brought::BY_SUPERVISOR), Ordering::Relaxed);
    // It stays so in what is forked.
    HAS_FORK_SITES.fetch_or(
        u32::from(how == brought::WITH_FORK_SITES),
        Ordering::Relaxed,
    );
    if !may_start || BEACON.load(Ordering::Relaxed) != 0 || is_sandboxed() {
        return REFUSED;
    }
    start(0, None)
}

// The stack is aligned to 16 bytes at the entry, as `fxsave64` and calls need it. The supervisor keeps no floating-point
// state on x86-64: all that the program can see of it is as it was at the trap.
#[cfg(all(feature = "standalone", target_arch = "x86_64"))]
core::arch::global_asm!(
    ".pushsection .text.memfold_entry, \"ax\"",
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
    // At `FORK_ENTRY`. The stack has where to return to, and the number of the system call, which is taken off with the
    // return. `rcx` and `r11` are the system call's to change; the flags the trampoline keeps.
    ".org memfold_entry + {fork_entry}",
    ".globl memfold_fork_site",
    ".hidden memfold_fork_site",
    ".type memfold_fork_site, @function",
    "memfold_fork_site:",
    "push rbp",
    "mov rbp, rsp",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r8",
    "push r9",
    "push r10",
    "push rbx",
    "push r12",
    "cld",
    "sub rsp, 512",
    "and rsp, -16",
    "fxsave64 [rsp]",
    "call {before}",
    "movzx ebx, al",
    "mov rdi, [rbp - 8]",
    "mov rsi, [rbp - 16]",
    "mov rdx, [rbp - 24]",
    "mov r8, [rbp - 32]",
    "mov r9, [rbp - 40]",
    "mov r10, [rbp - 48]",
    "mov eax, [rbp + 16]",
    "syscall",
    "mov r12, rax",
    "test ebx, ebx",
    "jz 2f",
    "mov rdi, rax",
    "call {after}",
    "2:",
    "fxrstor64 [rsp]",
    "mov rax, r12",
    "lea rsp, [rbp - 64]",
    "pop r12",
    "pop rbx",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop rbp",
    "ret 8",
    ".popsection",
    enter = sym enter,
    before = sym crate::fork_site::before,
    after = sym crate::fork_site::after,
    fork_entry = const memfold_sys::hello::FORK_ENTRY,
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
