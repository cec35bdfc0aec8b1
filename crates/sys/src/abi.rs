//! Our numbers and structures against the kernel's headers, as the crate linux-raw-sys generates them.

use crate::raw::nr;
use linux_raw_sys::general;

/// An ioctl that reads and writes a structure of `size` bytes (`_IOWR`).
pub(crate) fn read_write(kind: u8, number: u32, size: usize) -> usize {
    const BOTH_WAYS: usize = 3 << 30;
    BOTH_WAYS | size << 16 | usize::from(kind) << 8 | number as usize
}

/// Asserts that both structures have the same size and their fields the same offsets.
macro_rules! same_layout {
    ($ours:ty, $theirs:ty, { $($our:ident => $their:ident),* $(,)? }) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
        $(assert_eq!(
            core::mem::offset_of!($ours, $our),
            core::mem::offset_of!($theirs, $their),
            "{}.{}",
            stringify!($ours),
            stringify!($our),
        );)*
    };
}
pub(crate) use same_layout;

macro_rules! numbers {
    ($($ours:ident => $theirs:ident),* $(,)?) => {
        [$((stringify!($ours), nr::$ours, general::$theirs)),*]
    };
}

#[test]
fn system_calls_have_the_kernels_numbers() {
    let numbers = numbers![
        READ => __NR_read,
        WRITE => __NR_write,
        CLOSE => __NR_close,
        MMAP => __NR_mmap,
        MPROTECT => __NR_mprotect,
        MUNMAP => __NR_munmap,
        MREMAP => __NR_mremap,
        RT_SIGACTION => __NR_rt_sigaction,
        RT_SIGPROCMASK => __NR_rt_sigprocmask,
        IOCTL => __NR_ioctl,
        MINCORE => __NR_mincore,
        MADVISE => __NR_madvise,
        DUP => __NR_dup,
        GETPID => __NR_getpid,
        PTRACE => __NR_ptrace,
        SOCKET => __NR_socket,
        CONNECT => __NR_connect,
        SENDMSG => __NR_sendmsg,
        RECVMSG => __NR_recvmsg,
        GETSOCKOPT => __NR_getsockopt,
        CLONE => __NR_clone,
        EXIT => __NR_exit,
        KILL => __NR_kill,
        CHDIR => __NR_chdir,
        READLINKAT => __NR_readlinkat,
        MUNLOCK => __NR_munlock,
        PRCTL => __NR_prctl,
        SETGROUPS => __NR_setgroups,
        SETRESUID => __NR_setresuid,
        GETRESUID => __NR_getresuid,
        SETRESGID => __NR_setresgid,
        CAPSET => __NR_capset,
        SETSID => __NR_setsid,
        GETTID => __NR_gettid,
        FUTEX => __NR_futex,
        EXIT_GROUP => __NR_exit_group,
        PPOLL => __NR_ppoll,
        OPENAT => __NR_openat,
        GETRANDOM => __NR_getrandom,
        USERFAULTFD => __NR_userfaultfd,
        PREADV2 => __NR_preadv2,
        PIDFD_SEND_SIGNAL => __NR_pidfd_send_signal,
        PIDFD_OPEN => __NR_pidfd_open,
        CLOSE_RANGE => __NR_close_range,
        PIDFD_GETFD => __NR_pidfd_getfd,
        MSEAL => __NR_mseal,
    ];
    #[cfg(target_arch = "x86_64")]
    let (own, file) = (
        numbers![
            ARCH_PRCTL => __NR_arch_prctl,
            CLONE3 => __NR_clone3,
            FORK => __NR_fork,
            RT_SIGRETURN => __NR_rt_sigreturn,
            VFORK => __NR_vfork,
        ],
        include_str!("raw/x86_64.rs"),
    );
    #[cfg(target_arch = "aarch64")]
    let (own, file): ([(&str, usize, u32); 0], _) = ([], include_str!("raw/aarch64.rs"));
    for (name, ours, theirs) in numbers.into_iter().chain(own) {
        assert_eq!(ours, theirs as usize, "{name}");
    }
    let defined = file.matches("    pub const ").count();
    assert_eq!(
        numbers.len() + own.len(),
        defined,
        "a number of the architecture's file is not listed here"
    );
}

#[test]
fn futexes_have_the_kernels_bits() {
    assert_eq!(crate::futex::OWNER_DIED, general::FUTEX_OWNER_DIED);
    assert_eq!(crate::futex::WAITERS, general::FUTEX_WAITERS);
    assert_eq!(
        crate::thread::ROBUST_LIMIT,
        general::ROBUST_LIST_LIMIT as usize - 48,
        "below the kernel's limit"
    );
}

#[test]
fn the_longest_socket_path_is_the_kernels() {
    let address = linux_raw_sys::net::sockaddr_un {
        sun_family: 0,
        sun_path: [0; crate::hello::SOCKET_PATH_MAX],
    };
    assert_eq!(address.sun_path.len(), crate::hello::SOCKET_PATH_MAX);
    assert_eq!(
        crate::socket::SO_PEERPIDFD,
        linux_raw_sys::net::SO_PEERPIDFD as i32
    );
    assert_eq!(
        crate::socket::SO_PASSRIGHTS,
        linux_raw_sys::net::SO_PASSRIGHTS as i32
    );
}
