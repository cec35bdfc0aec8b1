//! What makes a stopped thread unfit for work in its name.

use super::{Memory, trace};
use crate::process::{Process, named_field};
use std::io;

/// `PTRACE_GET_RSEQ_CONFIGURATION`, which libc has for glibc on x86-64 alone.
const GET_RSEQ_CONFIGURATION: u32 = 0x420f;

/// `PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG`, which libc lacks.
const GET_SYSCALL_USER_DISPATCH_CONFIG: u32 = 0x4211;

/// Whether the thread is in a restartable sequence, which the kernel would not abort if it goes on elsewhere and comes
/// back. Between two of them the pointer to one may still be set: then the answer is yes, too.
pub(super) fn is_in_sequence(thread: i32, memory: &Memory) -> io::Result<bool> {
    /// As `linux/ptrace.h` has it.
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        area: u64,
        size: u32,
        signature: u32,
        flags: u32,
        padding: u32,
    }
    /// Where in the area the pointer is.
    const POINTER: u64 = 8;
    let mut found = Configuration::default();
    let place = (&raw mut found) as usize;
    let size = size_of::<Configuration>();
    match trace(GET_RSEQ_CONFIGURATION, thread, size, place) {
        Ok(()) => {}
        // The kernel knows none (before Linux 5.13, or built without).
        Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => {
            return Ok(false);
        }
        Err(error) => return Err(error),
    }
    if found.area == 0 {
        return Ok(false);
    }
    let pointer = memory.read(found.area.wrapping_add(POINTER), size_of::<u64>())?;
    Ok(pointer.iter().any(|byte| *byte != 0))
}

/// Whether the kernel dispatches a system call that the thread makes to the program (`PR_SET_SYSCALL_USER_DISPATCH`).
/// `None` if it does not tell (before Linux 6.4).
pub(super) fn is_dispatched(thread: i32, memory: &Memory) -> io::Result<Option<bool>> {
    /// As `linux/ptrace.h` has it.
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        mode: u64,
        selector: u64,
        offset: u64,
        length: u64,
    }
    const OFF: u64 = 0;
    const ALLOW: u8 = 0;
    let mut found = Configuration::default();
    let place = (&raw mut found) as usize;
    let size = size_of::<Configuration>();
    match trace(GET_SYSCALL_USER_DISPATCH_CONFIG, thread, size, place) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(None),
        // This architecture has none.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(Some(false)),
        Err(error) => return Err(error),
    }
    Ok(Some(match found {
        Configuration { mode: OFF, .. } => false,
        // Wherever the vDSO is: the program may allow that, too.
        Configuration { selector: 0, .. } => true,
        Configuration { selector, .. } => memory.read(selector, 1)? != [ALLOW],
    }))
}

/// Whether a process has a handler for a signal.
pub(super) fn catches(process: &Process, signal: i32) -> bool {
    let Ok(status) = process.text("status") else {
        return false;
    };
    let caught = named_field(&status, "SigCgt");
    let caught = caught.and_then(|text| u64::from_str_radix(text, 16).ok());
    caught.is_some_and(|caught| caught & bit(signal) != 0)
}

/// A signal in a set.
pub(super) const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}
