//! Carrying pages off to the stage where the kernel has no `UFFDIO_MOVE` (before Linux 6.8).
//!
//! `mremap` with `MREMAP_DONTUNMAP` takes the pages of a run away atomically, as `UFFDIO_MOVE` does, whoever shares them.
//! Its event tells the supervisor; this thread waits in the gate until it is read, and the supervisor relieves it
//! before that.
//!
//! Nothing ties the system call to the mapping that the pages were chosen from: another thread may have replaced it just
//! before, its event unread. Asking the userfaultfd first leaves the time between two system calls. What is mapped there
//! anew is not registered, so no event comes, and that is seen afterwards.

use crate::system::{self, die};
use memfold_sys::channel::{Channel, DropRun, MoveRun};
use memfold_sys::uffd::{Uffd, is_present};
use memfold_sys::{Errno, PAGE_SIZE};

/// Carries a run off, or the part of it that lies in one mapping.
pub fn carry_run(channel: &Channel, uffd: Uffd, run: &mut MoveRun) {
    run.moved = 0;
    let result = carry(channel, uffd, run);
    run.errno = result.err().map_or(0, |errno| errno.0);
}

fn carry(channel: &Channel, uffd: Uffd, run: &mut MoveRun) -> Result<(), Errno> {
    let bytes = |pages: u32| pages as usize * PAGE_SIZE;
    let (source, target) = (run.source as usize, run.target as usize);
    let mut pages = run.pages;
    system::check_unlocked(source, bytes(pages))?;
    // Else the next system call would raise another event.
    uffd.unregister(run.target, bytes(pages) as u64)?;
    // All of it in one mapping, or else the target is unmapped in vain.
    while !uffd.is_registered(run.source, bytes(pages) as u64) {
        pages /= 2;
        if pages == 0 {
            return Err(Errno::EAGAIN);
        }
    }
    let length = bytes(pages);
    if let Err(errno) = system::carry_off(source, target, length) {
        // If it was unmapped and another thread's memory lies there now, or if it was not unmapped, it is not used again.
        let is_mapped = system::map_again(target, length);
        return Err(if is_mapped { errno } else { Errno::ENOSPC });
    }
    if channel.gate.is_inside() {
        // No event was read, so none came.
        let mut places = (target..target + length).step_by(PAGE_SIZE);
        if places.any(|place| is_present(place as u64)) {
            die(b"memfold: memory was mapped anew while its pages were taken away; the program is stopped, as they may be missed\n");
        }
        return Err(Errno::EFAULT);
    }
    run.moved = pages;
    // As the rest of the arena.
    let _ = system::keep_from_children(target, length);
    let _ = system::unmark(target, length);
    Ok(())
}

/// Frees places of the stage, which the first userfaultfd must not report.
pub fn drop_run(uffd: Uffd, run: &DropRun) -> Result<(), Errno> {
    let length = run.pages as usize * PAGE_SIZE;
    uffd.unregister(run.start, length as u64)?;
    system::drop_pages(run.start as usize, length)
}
