//! Mappings of the supervisor's own memory.

use crate::PAGE_SIZE;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A private anonymous mapping, unmapped on drop. Pages take memory when first touched.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory owned by this value; access goes through raw pointers whose
// users answer for their own synchronisation.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes without reserving swap or memory for them.
    pub fn anonymous(length: usize) -> io::Result<Mapping> {
        Self::map(
            length,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
        )
    }

    /// Maps `length` bytes of a descriptor shared.
    pub fn shared(descriptor: &impl AsFd, length: usize) -> io::Result<Mapping> {
        let descriptor = descriptor.as_fd().as_raw_fd();
        Self::map(length, libc::MAP_SHARED, descriptor)
    }

    /// Maps `length` bytes of a descriptor shared, right behind a page of this process's own: what
    /// the other side must not reach goes there.
    pub fn shared_behind_own_page(descriptor: &impl AsFd, length: usize) -> io::Result<Mapping> {
        let mapping = Self::anonymous(PAGE_SIZE + length)?;
        // SAFETY: replaces part of a mapping that was made just now and that nobody uses yet.
        let shared = unsafe {
            libc::mmap(
                mapping.start.as_ptr().add(PAGE_SIZE).cast(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                descriptor.as_fd().as_raw_fd(),
                0,
            )
        };
        if shared == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(mapping)
    }

    fn map(length: usize, flags: i32, fd: i32) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice harms nobody.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own; nobody uses it after the value is gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Gives the memory of a range back to the system, also where it is locked; it reads as zero
/// afterwards.
///
/// # Safety
/// The page-aligned range lies in one [`Mapping`] and nobody uses its contents.
pub unsafe fn discard(start: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    if unsafe { libc::madvise(start.as_ptr().cast(), length, libc::MADV_DONTNEED_LOCKED) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// An anonymous file of fixed size for sharing memory with a program, which cannot shrink it
/// under its reader.
pub fn sealed_file(length: usize) -> io::Result<OwnedFd> {
    // SAFETY: a terminated name and flags.
    let fd = unsafe {
        libc::memfd_create(
            c"memfold".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: numbers only, on our own descriptor.
    let sized = unsafe {
        libc::ftruncate(fd, length as i64) == 0
            && libc::fcntl(
                fd,
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
            ) == 0
    };
    if sized {
        Ok(file)
    } else {
        Err(io::Error::last_os_error())
    }
}
