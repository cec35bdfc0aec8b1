//! Carrying pages off to the stage where the kernel has no `UFFDIO_MOVE` (before Linux 6.8).
//!
//! `mremap` with `MREMAP_DONTUNMAP` takes the pages of a run away atomically, as `UFFDIO_MOVE` does, whoever shares them.
//! Its event tells the supervisor; this thread waits in the gate until it is read, and the supervisor relieves it
//! before that, and settles the run. The next run is begun once the gate is open again, and only if no event of the
//! program's was read meanwhile.
//!
//! Nothing ties the system call to the mapping that the pages were chosen from: another thread may have replaced it just
//! before, its event unread. Asking the userfaultfd first leaves the time between two system calls. What is mapped there
//! anew is not registered, so no event comes, and that is seen afterwards.

use crate::system::{self, die};
use core::sync::atomic::Ordering;
use memfold_sys::channel::{Channel, DropRun, MoveRun};
use memfold_sys::gate::{Abandoned, NAP_NS};
use memfold_sys::uffd::{Uffd, is_present};
use memfold_sys::{Errno, PAGE_SIZE};

/// Carries runs off, one after the other, until an event comes in between: of each, the part of it that lies in one
/// mapping. Stays in the gate.
///
/// # Errors
/// The supervisor is dead.
pub fn carry_runs(
    channel: &Channel,
    uffd: Uffd,
    (event_count, runs): (u32, &mut [MoveRun]),
    gone: &impl Fn() -> bool,
) -> Result<(), Abandoned> {
    for (index, run) in runs.iter_mut().enumerate() {
        if run.unshare != 0 {
            continue;
        }
        enter(channel, gone)?;
        run.moved = 0;
        let result = if channel.event_count.load(Ordering::Relaxed) == event_count {
            let result = carry(channel, uffd, (index, run), gone);
            if result.is_err() {
                // A reader that finds its first page missing must not take it for carried off.
                channel.carrying.store(0, Ordering::SeqCst);
            }
            result
        } else {
            Err(Errno::ECANCELED)
        };
        run.errno = result.err().map_or(0, |errno| errno.0);
    }
    enter(channel, gone)
}

/// Enters the gate, unless this thread is inside.
fn enter(channel: &Channel, gone: &impl Fn() -> bool) -> Result<(), Abandoned> {
    if channel.gate.is_inside() {
        return Ok(());
    }
    channel.gate.enter(NAP_NS, gone)
}

fn carry(
    channel: &Channel,
    uffd: Uffd,
    (index, run): (usize, &mut MoveRun),
    gone: &impl Fn() -> bool,
) -> Result<(), Errno> {
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
    // The kernel fills the places where a program locks all of its memory (`mlockall`): what is there then would be taken
    // for the run, before this has moved it.
    system::drop_pages(target, length)?;
    channel.carrying.store(index as u32 + 1, Ordering::SeqCst);
    let read_before = channel.carried.load(Ordering::Relaxed);
    if let Err(errno) = system::carry_off(source, target, length) {
        // If it was unmapped and another thread's memory lies there now, or if it was not unmapped, it is not used again.
        let is_mapped = system::map_again(target, length);
        return Err(if is_mapped { errno } else { Errno::ENOSPC });
    }
    // As the rest of the arena.
    let _ = system::keep_from_children(target, length);
    let _ = system::unmark(target, length);
    // Inside, it was not relieved, so no event was read. Else the thread that relieved it may have found the pages gone, before
    // this took away what had come there since: what it read is known once the gate is open.
    let relieved = !channel.gate.is_inside();
    if relieved && channel.gate.enter(NAP_NS, gone).is_err() {
        return Err(Errno::ESRCH);
    }
    if !relieved || channel.carried.load(Ordering::Acquire) == read_before {
        let mut places = (target..target + length).step_by(PAGE_SIZE);
        if places.any(|place| is_present(place as u64)) {
            die(b"memfold: memory was mapped anew while its pages were taken away; the program is killed, as they may be missed\n");
        }
        return Err(Errno::EFAULT);
    }
    run.moved = pages;
    Ok(())
}

/// Frees places of the stage, which the first userfaultfd must not report.
pub fn drop_run(uffd: Uffd, run: &DropRun) -> Result<(), Errno> {
    let length = run.pages as usize * PAGE_SIZE;
    uffd.unregister(run.start, length as u64)?;
    system::drop_pages(run.start as usize, length)
}
