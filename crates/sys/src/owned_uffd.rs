//! Userfaultfds as owned descriptors, for processes with the standard library.
//!
//! [`Uffd`] is a number, as the preload library has no owned descriptors. What creates one here closes it
//! on drop, and uses it through [`borrow`].

use crate::Errno;
use crate::uffd::{FEATURE_POISON, FEATURE_RWP_ASYNC, Message, Uffd};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// As [`Uffd::create`].
///
/// # Errors
/// `EPERM` without `CAP_SYS_PTRACE`, where neither `vm.unprivileged_userfaultfd` nor the device allows it;
/// what else the kernel refuses.
pub fn create() -> Result<OwnedFd, Errno> {
    Uffd::create().map(own)
}

/// As [`Uffd::create_for_user_mode`].
///
/// # Errors
/// What the kernel refuses.
pub fn create_for_user_mode() -> Result<OwnedFd, Errno> {
    Uffd::create_for_user_mode().map(own)
}

fn own(created: Uffd) -> OwnedFd {
    // SAFETY: called on the result of `create` alone, a new descriptor that nothing else owns.
    unsafe { OwnedFd::from_raw_fd(created.0) }
}

/// The calls of a userfaultfd. The result must not be used after the descriptor is closed: its number may
/// be another file's by then.
pub fn borrow(descriptor: &impl AsFd) -> Uffd {
    Uffd(descriptor.as_fd().as_raw_fd())
}

/// A userfaultfd in a program that may close descriptors which it does not know (`closefrom`), and have others by their
/// numbers then: those are not closed.
#[derive(Debug)]
pub struct ExposedUffd {
    descriptor: ManuallyDrop<OwnedFd>,
    identity: (u64, u64),
}

/// Device and inode. Each userfaultfd has an inode of its own.
fn identity(descriptor: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let found = rustix::fs::fstat(descriptor)?;
    Ok((found.st_dev, found.st_ino))
}

impl ExposedUffd {
    /// Takes a userfaultfd that was created just now.
    ///
    /// # Errors
    /// If the kernel does not identify it.
    pub fn new(descriptor: OwnedFd) -> io::Result<ExposedUffd> {
        Ok(ExposedUffd {
            identity: identity(descriptor.as_fd())?,
            descriptor: ManuallyDrop::new(descriptor),
        })
    }

    /// Whether the program has not closed it.
    pub fn is_open(&self) -> bool {
        identity(self.as_fd()).is_ok_and(|found| found == self.identity)
    }
}

impl AsFd for ExposedUffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for ExposedUffd {
    fn drop(&mut self) {
        if self.is_open() {
            // SAFETY: not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

/// One for questions to the kernel: either kind may be forbidden.
fn create_either() -> Result<OwnedFd, Errno> {
    create_for_user_mode().or_else(|_| create())
}

/// Whether this kernel's userfaultfd has a feature (`FEATURE_` of [`uffd`](crate::uffd)).
pub fn kernel_has(feature: u64) -> bool {
    let features = create_either().and_then(|descriptor| borrow(&descriptor).api(0));
    features.is_ok_and(|has| has & feature != 0)
}

/// Whether this kernel can tell which pages were accessed (`UFFDIO_RWPROTECT` without messages, Linux 7.3).
pub fn kernel_tracks_accesses() -> bool {
    // Which no kernel has without the synchronous mode.
    kernel_has(FEATURE_RWP_ASYNC)
}

/// Whether this kernel can have a page's faults raise `SIGBUS` (`UFFDIO_POISON`, Linux 6.6).
pub fn kernel_poisons() -> bool {
    kernel_has(FEATURE_POISON)
}

/// Whether this kernel can be asked to read messages without waiting (Linux 6.10), whatever the descriptor's flag says.
pub fn kernel_reads_now() -> bool {
    create_either().is_ok_and(|descriptor| {
        let uffd = borrow(&descriptor);
        let mut messages = [Message::default()];
        uffd.api(0).is_ok() && uffd.try_read_now(&mut messages) != Err(Errno::EOPNOTSUPP)
    })
}
