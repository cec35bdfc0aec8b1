//! Instructions on x86-64.

// The precompiled `core` names the unwinder's entry in its tables. Nothing unwinds here, and the
// symbol stays hidden: an exported one would take the place of that of programs written in Rust.
#[cfg(feature = "standalone")]
core::arch::global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: ud2",
);

/// Makes a request of Valgrind: a sequence of instructions without effect on a CPU (rotations by a full turn), after which
/// Valgrind looks for the request and its default answer. Returns the answer; 0 without Valgrind.
pub fn ask_valgrind(request: &[usize; 6]) -> usize {
    let answer: usize;
    // SAFETY: `rdi` is as it was afterwards; under Valgrind the request is read, and `rdx` written.
    unsafe {
        core::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inlateout("rdx") 0usize => answer,
            options(nostack),
        );
    }
    answer
}

/// Ends the process by SIGILL, which an instruction raises however it is blocked or ignored.
pub fn end_by_signal() -> ! {
    // SAFETY: raises a signal that cannot be blocked or ignored at that moment.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}
