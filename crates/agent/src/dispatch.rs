//! Syscall user dispatch: the kernel hands a thread's system calls to a SIGSYS handler (Linux 5.11).

use core::sync::atomic::{AtomicU8, Ordering};
use memfold_sys::Errno;
use memfold_sys::raw::{nr, syscall};

/// Read by the kernel at each system call of the thread: 0 allows it, 1 dispatches it.
pub static SELECTOR: AtomicU8 = AtomicU8::new(0);
const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Length of the instructions that are never dispatched: `mov eax, 15`, `syscall`, and where the latter ends.
const ALLOWED_BYTES: usize = 8;

/// Has the calling thread's system calls dispatched while [`SELECTOR`] is 1, but for those by the instructions at
/// `allowed`.
///
/// # Errors
/// Where the kernel does not know it, or a filter refuses it.
pub fn dispatch(allowed: usize) -> Result<(), Errno> {
    let selector = SELECTOR.as_ptr() as usize;
    let arguments = [
        PR_SET_SYSCALL_USER_DISPATCH,
        1,
        allowed,
        ALLOWED_BYTES,
        selector,
        0,
    ];
    // SAFETY: numbers, and a static that the kernel reads one byte of.
    Errno::result(unsafe { syscall(nr::PRCTL, arguments) }).map(|_| ())
}

/// Ends it.
pub fn allow_all() {
    // SAFETY: numbers only.
    unsafe { syscall(nr::PRCTL, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0]) };
}

/// Whether this kernel can dispatch system calls, and filters let it.
pub fn can_dispatch() -> bool {
    SELECTOR.store(0, Ordering::Relaxed);
    let can = dispatch(can_dispatch as *const () as usize).is_ok();
    allow_all();
    can
}
