//! In place of `dispatch.rs`, on architectures whose kernel does not hand system calls to user space, or did not when
//! this was written: arm64.

/// Whether this kernel can dispatch system calls.
pub fn can_dispatch() -> bool {
    false
}
