//! Address ranges for embedded regions: aligned, not inherited by forks, and for hosts without
//! userfaultfd a second view of the same memory.

use crate::PAGE_SIZE;
use crate::memory::{Mapping, unlock};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// A range of addresses of its own, aligned, unmapped on drop. Its head is memory; what rounding
/// adds behind it cannot be touched.
///
/// The range is not inherited by forked children: there its addresses are unmapped. Nor is it locked where the process
/// locks what it maps (`mlockall(MCL_FUTURE)`): the kernel would populate all of it, and not let its pages go.
#[derive(Debug)]
pub struct Reservation {
    start: NonNull<u8>,
    reserved: usize,
    length: usize,
    /// What the addresses must not be unmapped in: a forked child does not have them.
    owner: crate::fork::Owner,
}

// SAFETY: plain addresses owned by this value; users of the memory answer for themselves.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `length` bytes (whole pages) at a multiple of `alignment`, a power of two. Nothing
    /// may be accessed before [`Reservation::make_anonymous`] or [`Reservation::make_view`].
    ///
    /// # Errors
    /// If the kernel has no such range.
    ///
    /// # Panics
    /// If the length is no multiple of the page size or the alignment no power of two of pages.
    pub fn new(length: usize, alignment: usize) -> io::Result<Reservation> {
        assert!(length > 0 && length.is_multiple_of(PAGE_SIZE));
        assert!(alignment.is_power_of_two() && alignment >= PAGE_SIZE);
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let reserved = length
            .checked_next_multiple_of(alignment)
            .ok_or_else(too_long)?;
        let asked = reserved.checked_add(alignment).ok_or_else(too_long)?;
        let (anywhere, flags) = (
            std::ptr::null_mut(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let found = unsafe { mmap_anonymous(anywhere, asked, ProtFlags::empty(), flags)? };
        let before = found.align_offset(alignment);
        let behind = asked - before - reserved;
        // SAFETY: both ends lie in the mapping made above, outside what is kept of it. (Unmapping them
        // splits nothing but that mapping, so failure only leaves addresses reserved; a kernel without
        // the advice lets children inherit addresses that they do not touch.)
        let start = unsafe {
            let start = found.byte_add(before);
            if before > 0 {
                let _ = munmap(found, before);
            }
            if behind > 0 {
                let _ = munmap(start.byte_add(reserved), behind);
            }
            let _ = madvise(start, reserved, Advice::LinuxDontFork);
            start
        };
        let start = NonNull::new(start.cast()).ok_or_else(too_long)?;
        // SAFETY: what is kept of the mapping, which has no memory. Access would populate it if it were locked.
        let _ = unsafe { unlock(start, reserved) };
        Ok(Reservation {
            start,
            reserved,
            length,
            owner: crate::fork::Owner::this(),
        })
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Usable length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    fn address(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    /// Makes the range, but for the first `guard` bytes, private anonymous memory, without huge
    /// pages: each page is to come and go by itself.
    ///
    /// # Errors
    /// If the kernel refuses.
    ///
    /// # Panics
    /// If the guard is longer than the range.
    pub fn make_anonymous(&self, guard: usize) -> io::Result<()> {
        let length = self
            .length
            .checked_sub(guard)
            .expect("a guard inside the range");
        // SAFETY: the range is this value's own.
        unsafe {
            let address = self.address().add(guard);
            mprotect(address, length, MprotectFlags::READ | MprotectFlags::WRITE)?;
            // A kernel without huge pages refuses the advice, and does not need it.
            let _ = madvise(address, length, Advice::LinuxNoHugepage);
        }
        Ok(())
    }

    /// Makes the range a view of `file`, inaccessible until [`protect`] gives access.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn make_view(&self, file: &OwnedFd) -> io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces this value's own range.
        unsafe {
            mmap(
                self.address(),
                self.length,
                ProtFlags::empty(),
                flags,
                file,
                0,
            )?;
            madvise(self.address(), self.length, Advice::LinuxDontFork)?;
            // As in `new`: this is another mapping.
            unlock(self.start, self.length)
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // SAFETY: the value owns the range, and references into it do not outlive the value.
            let _ = unsafe { munmap(self.address(), self.reserved) };
        }
    }
}

/// Gives or takes all access to a range.
///
/// # Errors
/// `ENOMEM` where the process would have too many mappings.
///
/// # Safety
/// The page-aligned range lies in one [`Reservation`], and no thread touches it while it is inaccessible, but for those whose
/// fault is handled.
pub unsafe fn protect(start: NonNull<u8>, length: usize, accessible: bool) -> io::Result<()> {
    let access = if accessible {
        MprotectFlags::READ | MprotectFlags::WRITE
    } else {
        MprotectFlags::empty()
    };
    // SAFETY: the caller's promise.
    unsafe { mprotect(start.as_ptr().cast(), length, access)? };
    Ok(())
}

/// Frees the memory of a part of a file in memory that is mapped shared; it reads as zero afterwards. Needs no descriptor,
/// whose number may be another file's once the program has closed it.
///
/// # Errors
/// If the kernel refuses.
///
/// # Safety
/// The page-aligned range lies in the mapping, and its contents are given up.
pub unsafe fn free_shared(mapping: &Mapping, offset: usize, length: usize) -> io::Result<()> {
    let all = mapping.start().as_ptr();
    // SAFETY: the caller's promise.
    let free = || unsafe { madvise(all.add(offset).cast(), length, Advice::LinuxRemove) };
    match free() {
        // Locked by the program (`mlockall`). The whole mapping is unlocked: a part would become a VMA of its own.
        Err(rustix::io::Errno::INVAL) => {
            // SAFETY: locks nothing, and changes no byte.
            unsafe { rustix::mm::munlock(all.cast(), mapping.length())? };
            Ok(free()?)
        }
        freed => Ok(freed?),
    }
}

/// Makes addresses inaccessible, for good, unless something is mapped there.
///
/// # Errors
/// `EEXIST` if something is; what the kernel refuses.
pub fn occupy(start: usize, length: usize) -> io::Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    let wanted = std::ptr::without_provenance_mut(start);
    // SAFETY: replaces no mapping, and gives no access.
    unsafe { mmap_anonymous(wanted, length, ProtFlags::empty(), flags)? };
    Ok(())
}

/// Keeps a mapping out of forked children.
///
/// # Errors
/// If the kernel refuses.
pub fn dont_fork(mapping: &Mapping) -> io::Result<()> {
    let address = mapping.start().as_ptr().cast();
    // SAFETY: advice on a live mapping; forked children do not touch it.
    unsafe { madvise(address, mapping.length(), Advice::LinuxDontFork)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::sealed_file;

    #[test]
    fn shared_memory_is_freed_without_its_descriptor_and_though_it_is_locked() {
        let mapping = Mapping::shared(&sealed_file(4 * PAGE_SIZE).unwrap(), 4 * PAGE_SIZE).unwrap();
        // SAFETY: the mapping is this test's own, and any bytes are a value.
        unsafe {
            let page = |number: usize| mapping.start().as_ptr().add(number * PAGE_SIZE);
            (0..4).for_each(|number| page(number).write_volatile(7));
            free_shared(&mapping, PAGE_SIZE, PAGE_SIZE).unwrap();
            if rustix::mm::mlock(page(0).cast(), 4 * PAGE_SIZE).is_err() {
                return memfold_testing::skip("memory that may be locked (ulimit -l)");
            }
            free_shared(&mapping, 2 * PAGE_SIZE, PAGE_SIZE).unwrap();
            let found = [0, 1, 2, 3].map(|number| page(number).read_volatile());
            assert_eq!(found, [7, 0, 0, 7]);
        }
    }
}
