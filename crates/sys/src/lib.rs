//! Every raw system call of memfold.
//!
//! Without the `std` feature the crate is the allocation-free core that the preload library
//! (`memfold-agent`) is made of: system calls by instruction, futexes, the userfaultfd ioctls and
//! the layout of the channel that a program's helper thread shares with its supervisor. With
//! `std` it also holds what only the supervisor needs: descriptor passing, reading another
//! process, memory for the pool.
//!
//! Linux on x86-64 and aarch64, 4 KiB pages. What differs between the two is in `raw`, `signal` and
//! `tracee`, one file for each.
#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("memfold supports Linux on x86-64 and aarch64 only");

#[cfg(all(test, feature = "std"))]
mod abi;
pub mod addresses;
#[allow(
    missing_debug_implementations,
    reason = "memory that the program writes to as well"
)]
pub mod channel;
mod errno;
pub mod futex;
pub mod gate;
pub mod hello;
#[cfg(feature = "std")]
pub mod huge;
#[cfg(all(test, loom))]
mod models;
pub mod raw;
mod sync;
#[allow(
    missing_debug_implementations,
    reason = "the words of a message mean nothing without its event"
)]
pub mod uffd;
pub mod zygote;

#[cfg(feature = "std")]
pub mod alarm;
#[cfg(feature = "std")]
pub mod deadline;
#[cfg(feature = "std")]
pub mod epoll;
#[cfg(feature = "std")]
pub mod exec;
#[cfg(feature = "std")]
pub mod fork;
#[cfg(feature = "std")]
pub mod guardian;
#[cfg(feature = "std")]
pub mod inherited;
#[cfg(feature = "std")]
pub mod machine;
#[cfg(feature = "std")]
pub mod memory;
#[cfg(feature = "std")]
pub mod owned_uffd;
#[cfg(feature = "std")]
pub mod page_buffer;
#[cfg(feature = "std")]
pub mod port;
#[cfg(feature = "std")]
pub mod privilege;
#[cfg(feature = "std")]
pub mod probe;
#[cfg(feature = "std")]
pub mod process;
#[cfg(feature = "std")]
pub mod reserve;
#[cfg(feature = "std")]
pub mod signal;
#[cfg(feature = "std")]
pub mod socket;
#[cfg(feature = "std")]
pub mod thread;
#[cfg(feature = "std")]
pub mod tracee;
#[cfg(feature = "ublk")]
pub mod ublk;

/// What the fuzz targets run on their input, and tests on what lies in `fuzz/corpus`.
#[cfg(all(feature = "std", any(test, feature = "fuzzing")))]
#[doc(hidden)]
pub mod fuzzing;

pub use errno::Errno;
#[cfg(feature = "std")]
pub use errno::is_shortage;

/// Bytes of a page. memfold refuses hosts where it differs.
pub const PAGE_SIZE: usize = 4096;
