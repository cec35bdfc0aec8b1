//! The steps that all kinds of faults are made of: copy in, wake, kill, and what to do on an error.

use crate::page::{VirtualPage, bytes};
use crate::supervised::fault::message::Served;
use crate::supervised::space::AddressSpace;
use memfold_sys::Errno;
use memfold_sys::uffd::Partial;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Copies pages in and wakes who waits for them.
pub fn copy(
    space: &AddressSpace,
    page: VirtualPage,
    source: &[u8],
    pages: u64,
) -> Result<(), Partial> {
    space.uffd().copy_in(page.address(), source, bytes(pages))
}

/// Wakes whoever waits for the pages, to fault again or run on.
pub fn wake(space: &AddressSpace, page: VirtualPage, pages: u64) {
    // Fails only if the address space is gone, and its threads with it.
    let _ = space.uffd().wake(page.address(), bytes(pages));
}

pub fn after_failure(space: &AddressSpace, page: VirtualPage, errno: Errno) -> Served {
    match errno {
        Errno::EAGAIN => Served::Retry,
        Errno::ESRCH => {
            space.life.die();
            Served::Done
        }
        Errno::ENOENT => {
            // Unmapped, or not ours any more: the event is on its way.
            wake(space, page, 1);
            Served::Done
        }
        _ => {
            // No memory, say: the thread tries again, but not at once.
            space.resources.errors.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(200));
            wake(space, page, 1);
            Served::Done
        }
    }
}

/// A stored page cannot be had any more: the program must not run on with other bytes.
pub fn kill_program(space: &AddressSpace, page: VirtualPage, error: &dyn std::fmt::Display) {
    space.kill_program(&format!(
        "a stored page (address {:#x}) cannot be read back, and it must not be given wrong data: {error}",
        page.address()
    ));
}
