//! Steps common to all kinds of faults: copy in, wake, handle an error, kill.

use crate::page::{PageRange, VirtualPage};
use crate::supervised::fault::message::{Fault, Resolution};
use crate::supervised::kernel::Memory;
use crate::supervised::space::AddressSpace;
use memfold_sys::Errno;
use memfold_sys::uffd::Partial;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Copies pages, which are charged already ([`Charged`](super::room::Charged)), into managed memory (`UFFDIO_COPY`),
/// which wakes the threads that wait for them.
pub(crate) fn copy(
    space: &AddressSpace,
    page: VirtualPage,
    source: &[u8],
    pages: u64,
) -> Result<(), Partial> {
    let charged = space.sampling.filling.load(Ordering::Relaxed);
    debug_assert!(charged >= pages, "copied before it is charged");
    let copied = space.uffd().copy_in(page, source, pages);
    let end = page.plus(pages);
    space.cow.note_writable(PageRange { start: page, end });
    copied
}

/// Counts a fault that was served, and how long that took.
pub(crate) fn note_served(space: &AddressSpace, fault: &Fault, elapsed: Duration) {
    let nanoseconds = elapsed.as_nanos() as u64;
    space.resources.latency.record(nanoseconds);
    if !fault.protected {
        let counted = &space.sampling.counted_faults;
        counted.fetch_add(1, Ordering::Relaxed);
    }
}

/// Wakes the threads that wait for the pages; they run on or fault again.
pub(crate) fn wake(space: &AddressSpace, page: VirtualPage, pages: u64) {
    // Fails only if the address space, and so every waiting thread, is gone.
    let _ = space.uffd().wake(PageRange {
        start: page,
        end: page.plus(pages),
    });
}

/// Handles an error of an ioctl that was to resolve a fault on `page`: the fault is served again, or
/// its thread is woken to fault again.
pub(crate) fn after_failure(space: &AddressSpace, page: VirtualPage, errno: Errno) -> Resolution {
    match errno {
        Errno::EAGAIN => Resolution::Retry,
        Errno::ESRCH => {
            space.life.die();
            Resolution::Done
        }
        Errno::ENOENT => {
            // Unmapped or unregistered; the event is not read yet.
            wake(space, page, 1);
            Resolution::Done
        }
        _ => {
            // For example ENOMEM: delay the thread, then let it fault again.
            space.resources.errors.fetch_add(1, Ordering::Relaxed);
            crate::time::sleep(Duration::from_micros(200));
            wake(space, page, 1);
            Resolution::Done
        }
    }
}

/// Kills a program whose stored page cannot be read back, as it must not run with other data.
pub(crate) fn kill_program(space: &AddressSpace, page: VirtualPage, error: &dyn std::fmt::Display) {
    space.kill_program(&format!(
        "its swapped-out page at {:#x} cannot be read back ({error}), and must not be replaced by wrong data",
        page.address()
    ));
}
