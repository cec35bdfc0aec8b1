//! The registers and the signal mask of a thread whose system call came as a signal (x86-64).

/// The part of a signal's `ucontext` that is used here.
#[repr(C)]
pub struct Context {
    flags: u64,
    link: usize,
    stack: [usize; 3],
    r8: usize,
    r9: usize,
    r10: usize,
    r11: usize,
    r12_to_r15: [usize; 4],
    pub rdi: usize,
    pub rsi: usize,
    rbp: usize,
    rbx: usize,
    pub rdx: usize,
    pub rax: usize,
    rcx: usize,
    rsp: usize,
    pub rip: usize,
    /// Flags, segments, error, trap, old mask, CR2, floating-point state, reserved.
    rest: [usize; 15],
    pub mask: u64,
}

impl Context {
    /// Of the system call.
    pub fn arguments(&self) -> [usize; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }
}

/// `rt_sigprocmask` in the context: the handler's return sets the mask. The signals of `never_blocked` stay unblocked.
pub fn set_mask(context: &mut Context, never_blocked: u64) -> usize {
    let (how, new, old) = (
        context.rdi,
        context.rsi as *const u64,
        context.rdx as *mut u64,
    );
    let before = context.mask;
    // SAFETY: the program's pointers, null or live, as it vouches for them.
    unsafe {
        if !new.is_null() {
            let new = new.read_unaligned();
            context.mask = match how {
                0 => before | new,
                1 => before & !new,
                _ => new,
            } & !never_blocked;
        }
        if !old.is_null() {
            old.write_unaligned(before);
        }
    }
    0
}
