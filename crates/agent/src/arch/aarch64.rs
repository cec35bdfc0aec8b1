//! Instructions on aarch64.

// The precompiled `core` names the unwinder's entry in its tables. Nothing unwinds here, and the
// symbol stays hidden: an exported one would take the place of that of programs written in Rust.
#[cfg(feature = "standalone")]
core::arch::global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: udf #0",
);

/// Makes a request of Valgrind: a sequence of instructions without effect on a CPU (rotations by two full turns), after
/// which Valgrind looks for the request and its default answer. Returns the answer; 0 without Valgrind.
pub fn ask_valgrind(request: &[usize; 6]) -> usize {
    let answer: usize;
    // SAFETY: `x12` is as it was afterwards; under Valgrind the request is read, and `x3` written.
    unsafe {
        core::arch::asm!(
            "ror x12, x12, #3",
            "ror x12, x12, #13",
            "ror x12, x12, #51",
            "ror x12, x12, #61",
            "orr x10, x10, x10",
            in("x4") request.as_ptr(),
            inlateout("x3") 0usize => answer,
            options(nostack),
        );
    }
    answer
}

/// Ends the process by SIGILL, which an instruction raises however it is blocked or ignored.
pub fn end_by_signal() -> ! {
    // SAFETY: raises a signal that cannot be blocked or ignored at that moment.
    unsafe { core::arch::asm!("udf #0", options(noreturn)) }
}
