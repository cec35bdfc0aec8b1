//! Futexes between processes (never `FUTEX_PRIVATE_FLAG`: the words lie in shared memory).

use crate::Errno;
use crate::raw::{nr, syscall};
use core::sync::atomic::AtomicU32;

const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;

/// Set in a robust futex by the kernel when the owner died.
pub const OWNER_DIED: u32 = 0x4000_0000;
/// Set in a robust futex while a thread waits for it: the kernel wakes that thread when the owner dies.
pub const WAITERS: u32 = 0x8000_0000;

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

/// Sleeps while `*word == expected`, at most `timeout_ns` (forever if `None`).
///
/// Returns at any wake-up, also a spurious one; `ETIMEDOUT` and `EAGAIN` (the value differed) are
/// reported, the caller looks at the word again in each case.
pub fn wait(word: &AtomicU32, expected: u32, timeout_ns: Option<u64>) -> Result<(), Errno> {
    let timeout = timeout_ns.map(|ns| Timespec {
        seconds: (ns / 1_000_000_000) as i64,
        nanoseconds: (ns % 1_000_000_000) as i64,
    });
    let pointer = timeout
        .as_ref()
        .map_or(0, |t| core::ptr::from_ref::<Timespec>(t) as usize);
    // SAFETY: the word and the timeout outlive the call; FUTEX_WAIT writes to neither.
    let result = unsafe {
        syscall(
            nr::FUTEX,
            [
                word.as_ptr() as usize,
                FUTEX_WAIT,
                expected as usize,
                pointer,
                0,
                0,
            ],
        )
    };
    Errno::result(result).map(|_| ())
}

/// Wakes up to `count` waiters and returns how many were woken.
pub fn wake(word: &AtomicU32, count: u32) -> usize {
    // SAFETY: FUTEX_WAKE only uses the address as a key.
    let result = unsafe {
        syscall(
            nr::FUTEX,
            [word.as_ptr() as usize, FUTEX_WAKE, count as usize, 0, 0, 0],
        )
    };
    Errno::result(result).unwrap_or(0)
}

/// Wakes all waiters.
pub fn wake_all(word: &AtomicU32) {
    // The kernel takes the count as signed.
    wake(word, i32::MAX as u32);
}
