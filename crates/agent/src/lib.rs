//! The library that `memfold run` loads into each program.
//!
//! It does as little as can be done: when the program starts (and in each forked child) it starts
//! one helper thread, which opens two userfaultfds (in a forked child one; the kernel made the other),
//! hands copies to the supervisor, and from then on executes the supervisor's commands: move these
//! pages into the stage, drop those from it.
//! Everything else (which pages, faults, compression) is the supervisor's.
//!
//! What makes the thread invisible and unbreakable:
//! * it has its own descriptor table and closes everything it inherited, so the program never
//!   sees a descriptor of memfold's and can close none;
//! * it was made by the system call, without the C library: no TLS, no `errno`, no stack of the
//!   program's, all signals blocked;
//! * after its start it needs only `ioctl`, `madvise`, `mincore`, `munlock`, `futex` and `exit` (`mremap` and `mmap`
//!   where the kernel moves no pages; and more to stop the program), so that a program may filter its system calls or drop its privileges;
//! * its memory (stack, stage, trash, channel) is not inherited by forked children and is never
//!   managed: a helper that faulted on itself would wait for itself.
#![cfg_attr(feature = "standalone", no_std)]
// Without `standalone` there is no loader to call it: it is built for lints and documentation only.
#![cfg_attr(not(feature = "standalone"), allow(dead_code))]
#![allow(
    unreachable_pub,
    reason = "its interface is what it exports to the loader"
)]

mod arch;
mod arena;
mod carry;
#[cfg(target_arch = "x86_64")]
mod context;
#[cfg(target_arch = "x86_64")]
mod dispatch;
#[cfg(not(target_arch = "x86_64"))]
#[path = "undispatched.rs"]
mod dispatch;
mod entry;
mod fork;
#[cfg(target_arch = "x86_64")]
mod fork_site;
mod helper;
mod ioctl;
mod load;
mod message;
#[cfg(target_arch = "x86_64")]
mod prepared;
#[cfg(not(target_arch = "x86_64"))]
#[path = "unprepared.rs"]
mod prepared;
mod rendezvous;
mod start;
mod state;
mod system;
mod trace;

#[cfg(feature = "standalone")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here panics by design; if it did, a stopped program is better than a wrong one.
    system::kill_program()
}
