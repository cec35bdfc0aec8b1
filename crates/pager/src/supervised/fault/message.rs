//! A fault as reported by the kernel, and the possible results of its service.

use crate::page::VirtualPage;
use crate::supervised::space::AddressSpace;
use std::sync::atomic::Ordering;

/// A fault as reported by a userfaultfd message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    /// The faulting page.
    pub page: VirtualPage,
    /// The access was a write.
    pub write: bool,
    /// The page is present and write-protected.
    pub protected: bool,
    /// Value of [`AddressSpace::unregistered`] when the message was read.
    pub unregistered: u32,
}

impl Fault {
    /// What brings a page back of which there is no fault.
    pub(crate) fn of_recall(space: &AddressSpace, page: VirtualPage) -> Fault {
        Fault {
            page,
            write: false,
            protected: false,
            unregistered: space.unregistered.load(Ordering::Relaxed),
        }
    }

    /// Whether memory, possibly the faulting page, was unregistered since the message was read.
    /// Unregistering woke the thread, so a page that is still missing may belong to another
    /// userfaultfd, and must not be filled here. The gate is held shared.
    pub(crate) fn is_outdated(&self, space: &AddressSpace) -> bool {
        self.unregistered != space.unregistered.load(Ordering::Relaxed)
    }
}

/// Result of serving a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// The thread was woken, or is woken by the thread that claimed the page or by the reclaimer.
    Done,
    /// It waits for room or for another machine, in the queue of a thread that records it once it is served.
    Queued,
    /// The kernel answered EAGAIN: read events, then serve the fault again.
    Retry,
    /// The gate was not available within the thread's patience: serve the fault again later.
    GateMissed,
}

/// Whether a fault may wait for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Waits if the group is at its limit.
    MayDefer,
    /// Is served at once.
    Now,
    /// A fault of the helper, which makes room: served at once. Unlike a fault of the program, it does
    /// not show that a `madvise` of the page has returned.
    OfHelper,
}
