//! System calls on x86-64.

use core::arch::asm;

/// System call numbers.
pub mod nr {
    #![allow(missing_docs, reason = "the names of the kernel")]
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const MMAP: usize = 9;
    pub const MPROTECT: usize = 10;
    pub const MUNMAP: usize = 11;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const RT_SIGRETURN: usize = 15;
    pub const IOCTL: usize = 16;
    pub const MREMAP: usize = 25;
    pub const MINCORE: usize = 27;
    pub const MADVISE: usize = 28;
    pub const DUP: usize = 32;
    pub const GETPID: usize = 39;
    pub const SOCKET: usize = 41;
    pub const CONNECT: usize = 42;
    pub const SENDMSG: usize = 46;
    pub const RECVMSG: usize = 47;
    pub const GETSOCKOPT: usize = 55;
    pub const CLONE: usize = 56;
    pub const FORK: usize = 57;
    pub const VFORK: usize = 58;
    pub const EXIT: usize = 60;
    pub const KILL: usize = 62;
    pub const CHDIR: usize = 80;
    pub const PTRACE: usize = 101;
    pub const SETSID: usize = 112;
    pub const SETGROUPS: usize = 116;
    pub const SETRESUID: usize = 117;
    pub const GETRESUID: usize = 118;
    pub const SETRESGID: usize = 119;
    pub const CAPSET: usize = 126;
    pub const MUNLOCK: usize = 150;
    pub const PRCTL: usize = 157;
    pub const ARCH_PRCTL: usize = 158;
    pub const GETTID: usize = 186;
    pub const FUTEX: usize = 202;
    pub const EXIT_GROUP: usize = 231;
    pub const OPENAT: usize = 257;
    pub const READLINKAT: usize = 267;
    pub const PPOLL: usize = 271;
    pub const GETRANDOM: usize = 318;
    pub const USERFAULTFD: usize = 323;
    pub const PREADV2: usize = 327;
    pub const PIDFD_SEND_SIGNAL: usize = 424;
    pub const PIDFD_OPEN: usize = 434;
    pub const CLONE3: usize = 435;
    pub const CLOSE_RANGE: usize = 436;
    pub const PIDFD_GETFD: usize = 438;
    pub const MSEAL: usize = 462;
}

/// Starts a thread or process by the `clone` system call, which runs `entry` on a stack of its own.
/// Returns its number, or the kernel's error below zero.
///
/// # Safety
/// `stack_top` must be the 16-byte aligned end of an unused stack that stays mapped as long as it
/// runs, and `argument` what `entry` expects. Without thread-local storage, `entry` must not use
/// the C library.
pub unsafe fn clone(
    flags: usize,
    stack_top: usize,
    entry: extern "C" fn(*const u8) -> !,
    argument: *const u8,
) -> isize {
    let result: isize;
    // SAFETY: in what is started the registers are those of here but the stack pointer; it calls
    // `entry`, which never returns. In the starting thread it is a plain system call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") nr::CLONE as isize => result,
            in("rdi") flags,
            in("rsi") stack_top,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            in("r12") argument,
            in("r13") entry as *const () as usize,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Makes a system call and returns the kernel's raw result.
///
/// # Safety
/// The arguments must be what the system call expects; what it writes must be the caller's.
#[inline]
pub unsafe fn syscall(number: usize, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the instruction clobbers rcx, r11 and the result; the caller vouches for the rest.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}
