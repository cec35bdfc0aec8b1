//! Telling a forked child from its parent without asking the kernel: a page that forks wipe.

use crate::PAGE_SIZE;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Which process a value belongs to: the one that made it, not one forked from it, however it was
/// forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner(u64);

/// A word of memory that reads as zero in a forked child until it is written there.
fn mark() -> &'static AtomicU64 {
    /// Null before the first call. (A child that was forked in the midst of a `OnceLock`'s change would wait for its end.)
    static MARK: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
    let mut page = MARK.load(Ordering::Acquire);
    if page.is_null() {
        page = publish_page(&MARK);
    }
    // SAFETY: a page that `publish_page` mapped for good, or a parent's: aligned, and used as this atomic alone.
    unsafe { &*page }
}

/// Maps a page that forks wipe, unless another thread was first, whose page is returned then.
#[cold]
fn publish_page(mark: &AtomicPtr<AtomicU64>) -> *mut AtomicU64 {
    let flags = MapFlags::PRIVATE;
    // SAFETY: a new mapping of the kernel's choice, which is unmapped only below; the advice (Linux 4.14) acts in
    // forked children alone.
    let page = unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let page = rustix::mm::mmap_anonymous(ptr::null_mut(), PAGE_SIZE, access, flags)
            .expect("memory for one page");
        rustix::mm::madvise(page, PAGE_SIZE, Advice::LinuxWipeOnFork)
            .expect("a kernel that can wipe a page on fork");
        page
    };
    let fresh = page.cast::<AtomicU64>();
    let none = ptr::null_mut();
    match mark.compare_exchange(none, fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        Err(other) => {
            // SAFETY: mapped above, and not published: no other thread knows of it. (Where it fails, the page is left over.)
            let _ = unsafe { rustix::mm::munmap(page, PAGE_SIZE) };
            other
        }
    }
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

/// A value of each process, made when it is first asked for. A forked child begins with one of its own: its parent's may be
/// a lock that another thread held, or what such a lock guards. Never dropped.
#[derive(Debug)]
pub struct PerProcess<T: 'static>(AtomicPtr<(Owner, T)>);

impl<T: Send + Sync> PerProcess<T> {
    /// For a static variable.
    pub const fn new() -> Self {
        PerProcess(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of the calling process.
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        let found = self.0.load(Ordering::Acquire);
        // SAFETY: null, or leaked below.
        if let Some((owner, value)) = unsafe { found.as_ref() }
            && owner.is_here()
        {
            return value;
        }
        let fresh = Box::into_raw(Box::new((Owner::this(), make())));
        let set = self
            .0
            .compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire);
        let current = match set {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: made above, and not published.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
        // SAFETY: leaked here, or by the thread of this process that was first.
        unsafe { &(*current).1 }
    }
}

impl<T: Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
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
        let own = PerProcess::<bool>::new();
        assert!(!own.get_or_make(|| false));
        // SAFETY: as above; it allocates a word.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(*own.get_or_make(|| true)));
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            status
        };
        assert_eq!(libc::WEXITSTATUS(status), 1, "the child has its parent's");
        assert!(!own.get_or_make(|| true));
        assert!(owner.is_here());
    }
}
