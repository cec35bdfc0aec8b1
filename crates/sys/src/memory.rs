//! Mappings of the supervisor's own memory.

use crate::PAGE_SIZE;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::process::Resource;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Refuses kernels with other pages than [`PAGE_SIZE`] has bytes: those of arm64 may have 16 or 64 KiB.
///
/// # Errors
/// Says so.
pub fn check_page_size() -> io::Result<()> {
    let bytes = rustix::param::page_size();
    if bytes == PAGE_SIZE {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        format!(
            "the kernel's pages have {bytes} bytes; memfold needs a kernel with pages of {PAGE_SIZE}"
        ),
    ))
}

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
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, READ_WRITE, flags)? };
        Mapping::at(start, length)
    }

    /// Like [`Mapping::anonymous`], for a mapping of which only a part will ever be touched. Where the process locks what
    /// it maps (`mlockall`), each page is locked when it is touched, and none is populated beforehand.
    pub fn sparse(length: usize) -> io::Result<Mapping> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let (anywhere, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let start = unsafe { rustix::mm::mmap_anonymous(anywhere, length, none, flags)? };
        let mapping = Mapping::at(start, length)?;
        // SAFETY: the whole mapping, which has no memory yet.
        unsafe {
            if is_locked(mapping.start, length) {
                lock_on_fault(mapping.start, length)?;
            }
        }
        mapping.give_access()
    }

    /// Makes a mapping that is inaccessible yet readable and writable, which populates one that is locked.
    fn give_access(self) -> io::Result<Mapping> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the whole mapping, to which there is no reference yet.
        unsafe { rustix::mm::mprotect(self.start.as_ptr().cast(), self.length, access)? };
        Ok(self)
    }

    fn at(start: *mut std::ffi::c_void, length: usize) -> io::Result<Mapping> {
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, length })
    }

    /// Like [`Mapping::sparse`], of whole pages, and beginning at a multiple of `alignment`, which
    /// is a power of two and pages too.
    pub fn aligned(length: usize, alignment: usize) -> io::Result<Mapping> {
        let whole = length
            .checked_add(alignment)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = ManuallyDrop::new(Self::sparse(whole)?);
        let before = mapping.start.align_offset(alignment);
        // SAFETY: both ends lie in the mapping made just now, outside what is kept of it.
        unsafe {
            let start = mapping.start.add(before);
            if before > 0 {
                unmap(mapping.start, before);
            }
            unmap(start.add(length), alignment - before);
            Ok(Mapping { start, length })
        }
    }

    /// Maps `length` bytes of a descriptor shared.
    pub fn shared(descriptor: &impl AsFd, length: usize) -> io::Result<Mapping> {
        let (anywhere, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let start =
            unsafe { rustix::mm::mmap(anywhere, length, READ_WRITE, flags, descriptor, 0)? };
        Mapping::at(start, length)
    }

    /// Like [`Mapping::shared`], but neither locked nor populated where the process locks what it maps.
    pub fn shared_unlocked(descriptor: &impl AsFd, length: usize) -> io::Result<Mapping> {
        let (anywhere, none) = (std::ptr::null_mut(), ProtFlags::empty());
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let start = unsafe { rustix::mm::mmap(anywhere, length, none, flags, descriptor, 0)? };
        let mapping = Mapping::at(start, length)?;
        // SAFETY: the whole mapping, which has no memory yet; no contents change.
        unsafe { unlock(mapping.start, length)? };
        mapping.give_access()
    }

    /// Maps `length` bytes of a descriptor shared, right behind a private page: what the other side of the
    /// descriptor must not reach goes into that page.
    pub fn shared_behind_own_page(descriptor: &impl AsFd, length: usize) -> io::Result<Mapping> {
        let mapping = Self::anonymous(PAGE_SIZE + length)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces part of the mapping made just now, to which there is no reference yet.
        unsafe {
            let behind = mapping.start.as_ptr().add(PAGE_SIZE).cast();
            rustix::mm::mmap(behind, length, READ_WRITE, flags, descriptor, 0)?;
        }
        Ok(mapping)
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
        // SAFETY: the value owns the range, and references into it do not outlive the value.
        unsafe { unmap(self.start, self.length) };
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Unmaps a range. That fails only where the process has too many mappings to split one; then the addresses
/// stay taken.
///
/// # Safety
/// The page-aligned range is the caller's, and there is no reference into it.
unsafe fn unmap(start: NonNull<u8>, length: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), length) };
}

/// Gives the memory of a range back to the kernel, also where it is locked and [`kernel_frees_locked`]; it reads as
/// zero afterwards.
///
/// # Safety
/// The page-aligned range lies in one [`Mapping`] and its contents are not in use.
pub unsafe fn discard(start: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        match advise(start, length, libc::MADV_DONTNEED_LOCKED) {
            // Before Linux 5.18.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                advise(start, length, libc::MADV_DONTNEED)
            }
            done => done,
        }
    }
}

/// Whether a range is locked.
///
/// # Safety
/// The page-aligned range is a mapping's.
unsafe fn is_locked(start: NonNull<u8>, length: usize) -> bool {
    // The kernel refuses this advice for locked memory; what else it does with memory shows in nothing but its age.
    // SAFETY: the caller's promise; the advice changes no contents.
    let advised = unsafe { advise(start, length, libc::MADV_COLD) };
    advised.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
}

/// Unlocks a range if it is locked: filters of system calls may forbid to ask otherwise.
///
/// # Safety
/// The page-aligned range is a mapping's.
pub(crate) unsafe fn unlock(start: NonNull<u8>, length: usize) -> io::Result<()> {
    // SAFETY: the caller's promise; no contents change.
    unsafe {
        if is_locked(start, length) {
            rustix::mm::munlock(start.as_ptr().cast(), length)?;
        }
    }
    Ok(())
}

/// Has each page of a locked range locked when it is touched, or the range unlocked where its memory could not be freed
/// otherwise.
///
/// # Safety
/// The page-aligned range is a mapping's.
unsafe fn lock_on_fault(start: NonNull<u8>, length: usize) -> io::Result<()> {
    let start = start.as_ptr().cast();
    // SAFETY: the caller's promise; no contents change.
    unsafe {
        if !kernel_frees_locked() || libc::mlock2(start, length, libc::MLOCK_ONFAULT) != 0 {
            rustix::mm::munlock(start, length)?;
        }
    }
    Ok(())
}

/// Has a range locked where another one is, each page as it is touched, and unlocked where that is not: the kernel moves no
/// pages between the two kinds (`UFFDIO_MOVE`).
///
/// # Safety
/// Both page-aligned ranges are mappings'.
pub unsafe fn lock_as(
    (start, length): (NonNull<u8>, usize),
    (other, other_length): (NonNull<u8>, usize),
) -> io::Result<()> {
    // SAFETY: the caller's promise; no contents change.
    unsafe {
        if is_locked(other, other_length) {
            lock_on_fault(start, length)
        } else {
            Ok(rustix::mm::munlock(start.as_ptr().cast(), length)?)
        }
    }
}

/// Whether this kernel frees memory that stays locked (`MADV_DONTNEED_LOCKED`, Linux 5.18).
pub fn kernel_frees_locked() -> bool {
    // SAFETY: an empty range.
    let asked = unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_DONTNEED_LOCKED) };
    asked == 0
}

/// Takes the pages of a range away, and copies them over another one of the same length. The first range stays mapped,
/// and registered with its userfaultfd, and its pages are missing from one moment on: no access in between sees anything
/// else, and the copies have all that was written before. Needs nothing of a userfaultfd, unlike `UFFDIO_MOVE`, and so
/// cannot be refused for a page that a device writes to just now: what it writes later is lost. Of a range that is locked
/// meanwhile, pages may be taken nevertheless.
///
/// The pages are not moved to the second range itself: the kernel unmaps that before it looks whether it can move
/// them, and another thread's memory could come to lie there.
///
/// # Errors
/// `EINVAL` if part of the first range is locked, `EFAULT` if it lies in several mappings, `ENOMEM` if the process has too
/// many. Nothing was taken then.
///
/// # Safety
/// Both page-aligned ranges are private anonymous memory of the caller's, and there are no references into the second. The
/// first one's userfaultfd asks for no events, and the second has none.
pub unsafe fn carry_off(
    from: NonNull<u8>,
    to: NonNull<u8>,
    length: usize,
) -> Result<(), crate::Errno> {
    let errno = |error: io::Error| crate::Errno(error.raw_os_error().unwrap_or(libc::EINVAL));
    // The kernel would move locked pages, and forget that their old place is locked. It refuses this advice there.
    // SAFETY: the caller's promise; the advice changes no contents.
    unsafe { advise(from, length, libc::MADV_COLD) }.map_err(errno)?;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
    let nowhere = std::ptr::null_mut::<libc::c_void>();
    // rustix's passes no fifth argument, which the kernel takes for a wish here.
    // SAFETY: the caller's promise; the kernel chooses a free place.
    let moved = unsafe { libc::mremap(from.as_ptr().cast(), length, length, flags, nowhere) };
    if moved == libc::MAP_FAILED {
        return Err(errno(io::Error::last_os_error()));
    }
    // SAFETY: the new mapping is this function's alone, and the second range the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(moved.cast::<u8>(), to.as_ptr(), length);
        // It fails only if it would split a mapping where there are too many: the kernel may have merged this one.
        if libc::munmap(moved, length) != 0 {
            libc::madvise(moved, length, libc::MADV_DONTNEED);
        }
    }
    Ok(())
}

/// Ranges per `process_madvise`. Few enough for the stack: giving memory back must not allocate.
const MAX_RANGES: usize = 512;

/// Like [`discard`], for many ranges (start and length): with one system call for hundreds of them,
/// which flushes the TLBs once, so that short ranges cost half as much.
///
/// # Safety
/// As [`discard`], for each of them.
pub unsafe fn discard_all(
    ranges: impl ExactSizeIterator<Item = (NonNull<u8>, usize)>,
) -> io::Result<()> {
    let mut room = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; MAX_RANGES];
    let mut ranges = ranges;
    while ranges.len() > 0 {
        let count = ranges.len().min(MAX_RANGES);
        for (place, (start, length)) in room.iter_mut().zip(ranges.by_ref().take(count)) {
            place.iov_base = start.as_ptr().cast();
            place.iov_len = length;
        }
        // SAFETY: the caller's promise.
        unsafe { discard_vector(&room[..count]) }?;
    }
    Ok(())
}

/// # Safety
/// The ranges lie in one [`Mapping`], and their contents are not in use.
unsafe fn discard_vector(ranges: &[libc::iovec]) -> io::Result<()> {
    /// This process, without a descriptor of it.
    const PIDFD_SELF: libc::c_int = -10_000;
    if ranges.len() > 1 {
        // Before Linux 6.13 a process may not do this to itself.
        // SAFETY: the caller's promise; the vector has that length.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                PIDFD_SELF,
                ranges.as_ptr(),
                ranges.len(),
                libc::MADV_DONTNEED_LOCKED,
                0,
            )
        };
        let whole: usize = ranges.iter().map(|range| range.iov_len).sum();
        if usize::try_from(done) == Ok(whole) {
            return Ok(());
        }
    }
    for range in ranges {
        let start = NonNull::new(range.iov_base.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the caller's promise.
        unsafe { discard(start, range.iov_len) }?;
    }
    Ok(())
}

/// # Safety
/// The page-aligned range is a mapping's, and the advice is one that its users can stand.
pub(crate) unsafe fn advise(start: NonNull<u8>, length: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the caller's promise.
    if unsafe { libc::madvise(start.as_ptr().cast(), length, advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A memfd of fixed size (sealed) for sharing memory with a program, which cannot shrink it under its
/// reader.
///
/// # Errors
/// `EFBIG` if it would be longer than `ulimit -f` allows; what the kernel refuses.
pub fn sealed_file(length: usize) -> io::Result<OwnedFd> {
    let limit = rustix::process::getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| length as u64 > limit) {
        // ftruncate would raise SIGXFSZ, which ends the process.
        return Err(Errno::FBIG.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(c"memfold", flags)?;
    rustix::fs::ftruncate(&file, length as u64)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_carried_off_whole_and_locked_ones_stay() {
        let mapping = Mapping::anonymous(8 * PAGE_SIZE).unwrap();
        // SAFETY: pages of the mapping, whose bytes are any value, and to which there is no reference.
        unsafe {
            let from = mapping.start();
            let to = from.add(4 * PAGE_SIZE);
            from.write_volatile(7);
            to.write_volatile(8);
            carry_off(from, to, 3 * PAGE_SIZE).unwrap();
            assert_eq!((from.read_volatile(), to.read_volatile()), (0, 7));
            from.write_volatile(9);
            let page = from.as_ptr().cast();
            if rustix::mm::mlock(page, PAGE_SIZE).is_err() {
                memfold_testing::skip("memory that may be locked (ulimit -l)");
                return;
            }
            let refused = carry_off(from, to, 2 * PAGE_SIZE);
            assert_eq!(refused, Err(crate::Errno::EINVAL));
            assert_eq!((from.read_volatile(), to.read_volatile()), (9, 7));
            rustix::mm::munlock(page, PAGE_SIZE).unwrap();
            carry_off(from, to, PAGE_SIZE).unwrap();
            assert_eq!((from.read_volatile(), to.read_volatile()), (0, 9));
        }
    }

    #[test]
    fn what_cannot_be_carried_off_stays_and_so_does_the_place() {
        let mapping = Mapping::anonymous(8 * PAGE_SIZE).unwrap();
        // SAFETY: pages of the mapping, whose bytes are any value, and to which there is no reference.
        unsafe {
            let (from, to) = (mapping.start(), mapping.start().add(4 * PAGE_SIZE));
            from.write_volatile(7);
            from.add(PAGE_SIZE).write_volatile(8);
            to.write_volatile(9);
            // Two mappings from now on.
            advise(from, PAGE_SIZE, libc::MADV_DONTDUMP).unwrap();
            let refused = carry_off(from, to, 2 * PAGE_SIZE);
            assert_eq!(refused, Err(crate::Errno::EFAULT));
            let second = from.add(PAGE_SIZE).read_volatile();
            assert_eq!(
                (from.read_volatile(), second, to.read_volatile()),
                (7, 8, 9)
            );
            carry_off(from, to, PAGE_SIZE).unwrap();
            assert_eq!((from.read_volatile(), to.read_volatile()), (0, 7));
        }
    }

    /// One range, few, and more than go into one system call.
    #[test]
    fn discarded_ranges_read_zero_and_the_others_stay() {
        for count in [1, 2, MAX_RANGES + 3] {
            let pages = 3 * count;
            let mapping = Mapping::anonymous(pages * PAGE_SIZE).unwrap();
            // SAFETY: the mapping is this test's own; any bytes are a value.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(mapping.start().as_ptr(), mapping.length())
            };
            bytes.fill(7);
            let ranges = (0..count).map(|index| {
                // SAFETY: within the mapping.
                let start = unsafe { mapping.start().add((3 * index + 1) * PAGE_SIZE) };
                (start, PAGE_SIZE)
            });
            // SAFETY: pages of the mapping, read only afterwards.
            unsafe { discard_all(ranges) }.unwrap();
            for page in 0..pages {
                let expected = if page % 3 == 1 { 0 } else { 7 };
                // SAFETY: within the mapping; volatile, as the kernel changed it.
                let found = unsafe { mapping.start().add(page * PAGE_SIZE).read_volatile() };
                assert_eq!(found, expected, "page {page} of {pages}");
            }
        }
    }
}
