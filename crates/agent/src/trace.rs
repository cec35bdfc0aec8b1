//! The program's `ptrace`: what a program traces, the supervisor cannot trace to start its helper.
//!
//! So before a program traces another one, or has itself traced, the supervisor is told. From then on programs start their
//! helpers themselves.

use crate::ioctl::set_errno;
use crate::message::tell;
use crate::rendezvous::may_start_late;
use crate::start::is_sandboxed;
use crate::system;
use memfold_sys::Errno;
use memfold_sys::hello::TRACES;
use memfold_sys::raw::{nr, syscall};

/// Requests by which tracing begins.
const BEGINNINGS: [i32; 3] = [TRACE_ME, ATTACH, SEIZE];
const TRACE_ME: i32 = 0;
const ATTACH: i32 = 16;
const SEIZE: i32 = 0x4206;
/// Requests whose result the kernel writes to memory, and C libraries return.
const PEEKS: core::ops::RangeInclusive<i32> = 1..=3;

/// Stands in front of the C library's, which is variadic and does no more than this.
///
/// # Safety
/// As of `ptrace`.
#[cfg_attr(feature = "standalone", unsafe(no_mangle))]
pub unsafe extern "C" fn ptrace(request: i32, process: i32, address: usize, data: usize) -> isize {
    if BEGINNINGS.contains(&request) && may_start_late() {
        announce();
    }
    let mut peeked = 0isize;
    let is_peek = PEEKS.contains(&request);
    let data = if is_peek {
        (&raw mut peeked) as usize
    } else {
        data
    };
    let arguments = [request as usize, process as usize, address, data, 0, 0];
    // SAFETY: the caller's promise; a peek is written to a live word.
    let result = unsafe { syscall(nr::PTRACE, arguments) };
    match Errno::result(result) {
        Ok(_) if is_peek => {
            // -1 may be what is there.
            set_errno(Errno(0));
            peeked
        }
        Ok(result) => result as isize,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Tells the supervisor, and waits until it has taken note. Where it cannot be reached, nothing of it is managed.
fn announce() {
    if system::is_filtered() && is_sandboxed() {
        return;
    }
    // A handler that interrupted this would have it given up.
    let mask = system::block_signals();
    tell(TRACES);
    system::restore_signals(mask);
}
