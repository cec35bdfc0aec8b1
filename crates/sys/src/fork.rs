//! Telling a forked child from its parent without asking the kernel: a page that forks wipe.

use crate::PAGE_SIZE;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which process a value belongs to: the one that made it, not one forked from it, however it was
/// forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u64);

/// A word of memory that reads as zero in a forked child until it is written there.
fn mark() -> &'static AtomicU64 {
    static MARK: OnceLock<&'static AtomicU64> = OnceLock::new();
    MARK.get_or_init(|| {
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new mapping of the kernel's choice, never unmapped; the advice (Linux 4.14) acts in
        // forked children alone.
        let page = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let page = rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_SIZE, access, flags)
                .expect("memory for one page");
            rustix::mm::madvise(page, PAGE_SIZE, Advice::LinuxWipeOnFork)
                .expect("a kernel that can wipe a page on fork");
            page
        };
        // SAFETY: the page is mapped for good, aligned, and used as this atomic alone.
        unsafe { &*page.cast::<AtomicU64>() }
    })
}

impl Owner {
    /// The calling process.
    pub fn this() -> Owner {
        let mark = mark();
        let found = mark.load(Ordering::Relaxed);
        if found != 0 {
            return Owner(found);
        }
        // A PID alone is not unique: a grandchild may get a dead ancestor's. PID and time are.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |time| time.as_nanos() as u64);
        let fresh = (nanoseconds << 22 | u64::from(std::process::id())).max(1);
        match mark.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Owner(fresh),
            Err(other) => Owner(other),
        }
    }

    /// A number that no other owner has.
    pub fn number(self) -> u64 {
        self.0
    }

    /// Whether the calling process is the owner. A load; may be asked in a signal handler.
    #[inline]
    pub fn is_here(self) -> bool {
        mark().load(Ordering::Relaxed) == self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_owner() {
        let owner = Owner::this();
        assert!(owner.is_here());
        assert_eq!(Owner::this(), owner);
        // SAFETY: the child only reads memory and exits without running anything else.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(owner.is_here()));
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            status
        };
        assert_eq!(status, 0, "the child took itself for its parent");
        assert!(owner.is_here());
    }
}
