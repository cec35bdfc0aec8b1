//! System calls on aarch64.

use core::arch::asm;

/// System call numbers.
pub mod nr {
    #![allow(missing_docs, reason = "the names of the kernel")]
    pub const DUP: usize = 23;
    pub const IOCTL: usize = 29;
    pub const CHDIR: usize = 49;
    pub const OPENAT: usize = 56;
    pub const CLOSE: usize = 57;
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const PPOLL: usize = 73;
    pub const READLINKAT: usize = 78;
    pub const CAPSET: usize = 91;
    pub const EXIT: usize = 93;
    pub const EXIT_GROUP: usize = 94;
    pub const FUTEX: usize = 98;
    pub const PTRACE: usize = 117;
    pub const KILL: usize = 129;
    pub const RT_SIGACTION: usize = 134;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const SETRESUID: usize = 147;
    pub const GETRESUID: usize = 148;
    pub const SETRESGID: usize = 149;
    pub const SETSID: usize = 157;
    pub const SETGROUPS: usize = 159;
    pub const PRCTL: usize = 167;
    pub const GETPID: usize = 172;
    pub const GETTID: usize = 178;
    pub const SOCKET: usize = 198;
    pub const CONNECT: usize = 203;
    pub const GETSOCKOPT: usize = 209;
    pub const SENDMSG: usize = 211;
    pub const RECVMSG: usize = 212;
    pub const MUNMAP: usize = 215;
    pub const MREMAP: usize = 216;
    pub const CLONE: usize = 220;
    pub const MMAP: usize = 222;
    pub const MPROTECT: usize = 226;
    pub const MUNLOCK: usize = 229;
    pub const MINCORE: usize = 232;
    pub const MADVISE: usize = 233;
    pub const GETRANDOM: usize = 278;
    pub const USERFAULTFD: usize = 282;
    pub const PREADV2: usize = 286;
    pub const PIDFD_SEND_SIGNAL: usize = 424;
    pub const PIDFD_OPEN: usize = 434;
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
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x9",
            "blr x10",
            "udf #0",
            "2:",
            in("x8") nr::CLONE,
            inlateout("x0") flags as isize => result,
            in("x1") stack_top,
            in("x2") 0,
            in("x3") 0,
            in("x4") 0,
            in("x9") argument,
            in("x10") entry as *const () as usize,
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
    // SAFETY: the kernel changes no general register but the result's; the caller vouches for the rest.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") arguments[0] as isize => result,
            in("x1") arguments[1],
            in("x2") arguments[2],
            in("x3") arguments[3],
            in("x4") arguments[4],
            in("x5") arguments[5],
            options(nostack),
        );
    }
    result
}
