//! System calls by instruction: no C library, no `errno`, usable from a thread without TLS.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::{clone, nr, syscall};
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::{clone, nr, syscall};
