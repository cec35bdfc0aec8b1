//! The context of a signal, and a switch of stacks.

/// Whether a fault was raised by the fetch of an instruction.
///
/// # Safety
/// `context` is what the kernel gave a handler of SIGSEGV.
pub unsafe fn is_fetch(context: *const libc::c_void) -> bool {
    /// Bit of the CPU's page fault error code.
    const INSTRUCTION_FETCH: i64 = 1 << 4;
    // SAFETY: the caller's promise; the kernel fills in all registers.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & INSTRUCTION_FETCH != 0
}

/// The stack pointer of what a signal interrupted.
///
/// # Safety
/// `context` is what the kernel gave a handler.
pub unsafe fn stack_pointer(context: *const libc::c_void) -> usize {
    // SAFETY: the caller's promise; the kernel fills in all registers.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_RSP as usize] as usize
}

/// Calls `function(argument)` on another stack.
///
/// # Safety
/// `top` is the end of a mapped range, aligned to 16 bytes, that no other thread uses as a stack,
/// and is large enough. The function must not unwind.
#[inline(never)]
pub unsafe fn call_on_stack(
    top: *mut u8,
    function: extern "C" fn(*mut libc::c_void),
    argument: *mut libc::c_void,
) {
    // SAFETY: r12 and r13 are kept by the callee, so the old stack pointer comes back; everything
    // else that a C function may change is declared.
    unsafe {
        std::arch::asm!(
            "xchg rsp, r12",
            "call r13",
            "mov rsp, r12",
            inout("r12") top => _,
            in("r13") function,
            in("rdi") argument,
            clobber_abi("C"),
        );
    }
}
