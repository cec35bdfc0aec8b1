//! Copies of what a fork shares, under the limit.
//!
//! When one side of a fork writes to a page, the kernel copies it and asks nobody, faster than pages
//! can be moved out. So where the copies might take the group over its limit, both sides are
//! write-protected at the fork, or once the group comes near. The first write to a page is a fault
//! then, and waits for room as other faults do.
//!
//! The protection is nothing but this question: no state depends on it, and a page may be allowed to
//! be written at any time, in any state. What the kernel forgets (a page that was moved is not
//! protected) or refuses (while a change of the mappings is under way) is a page that nobody asks for.
//!
//! The last pages of stacks (`survey.rs`) are never protected: at the very end of a thread the kernel
//! writes there and does not wait. The helper, which writes to break the sharing of pages that are to
//! go out, never waits for room either: it makes it.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::PageState;
use crate::range_set::RangeSet;
use crate::supervised::fault::message::{Admission, Fault, Served};
use crate::supervised::fault::primitives::{after_failure, wake};
use crate::supervised::fault::room::must_wait;
use crate::supervised::group::Group;
use crate::supervised::reclaim::batch::Run;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use crate::sync::lock;
use memfold_sys::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages that a program which writes one behind the other may copy at a fault.
const WRITE_WINDOW: u64 = 16;
/// Pages that are allowed to be written at once where nothing is shared any more.
const ALONE_WINDOW: u64 = 512;

impl AddressSpace {
    /// [`AddressSpace::protect_if_near`], if that was not done since the last fork and others live
    /// who may share.
    pub fn protect_shared(&self) {
        if !self.cow.write_protected.load(Ordering::Relaxed)
            && self.fork.forked.load(Ordering::Relaxed)
            && !self.is_dead()
            && self.fork.family.has_others(self)
        {
            self.protect_if_near();
        }
    }

    /// Write-protects what is managed of the program if copies of it might take the group over its
    /// limit.
    pub fn protect_if_near(&self) {
        let copies = bytes(self.resident_pages().max(0) as u64);
        let group = &self.resources;
        if group.resident_bytes() + copies <= group.resident_limit_bytes() {
            return;
        }
        let ranges = lock(&self.managed).ranges().to_vec();
        if ranges.is_empty() {
            return;
        }
        // Before: a fork meanwhile is to be seen.
        self.cow.write_protected.store(true, Ordering::Relaxed);
        if !self.protect(&ranges) {
            self.cow.write_protected.store(false, Ordering::Relaxed);
        }
    }

    /// Protects what is managed from now on as the rest is.
    pub fn protect_new(&self, range: PageRange) {
        if self.cow.write_protected.load(Ordering::Relaxed) && !self.protect(&[range]) {
            self.cow.write_protected.store(false, Ordering::Relaxed);
        }
    }

    /// `false` if the kernel refuses for now, as mappings change.
    fn protect(&self, ranges: &[PageRange]) -> bool {
        let ends = ranges_of(&lock(&self.thread_ends));
        for range in ranges {
            for part in ends.uncovered(*range) {
                let (start, length) = (part.start.address(), bytes(part.pages()));
                if self.uffd().protect(start, length) == Err(Errno::EAGAIN) {
                    return false;
                }
            }
        }
        true
    }

    /// Before a command that takes pages out of sharing: the helper's write is not to be a fault.
    pub fn unprotect_for_cow_break(&self, moves: &[Run]) {
        // A child inherits the protection of its parent's pages.
        if !self.fork.forked.load(Ordering::Relaxed) {
            return;
        }
        for run in moves.iter().filter(|run| run.place.is_none()) {
            self.guard_helper();
            // Where it fails, the helper's fault is served.
            let length = bytes(u64::from(run.pages));
            let _ = self.uffd().unprotect(run.page.address(), length);
        }
    }

    /// How this thread's faults are let in.
    pub fn admission_of(&self, thread: u32) -> Admission {
        if thread != 0 && self.helper.load(Ordering::Relaxed) == thread {
            Admission::OfHelper
        } else {
            Admission::MayDefer
        }
    }

    /// Pages from `page` on that may be written now.
    fn write_window(&self, page: VirtualPage) -> PageRange {
        let pages = if self.cow.written_to.load(Ordering::Relaxed) == page.0 {
            WRITE_WINDOW
        } else {
            1
        };
        let advice = PageRange {
            start: page,
            end: page.plus(pages),
        };
        if pages > 1 {
            self.clip(page, advice)
        } else {
            advice
        }
    }

    /// Notes that the pages of a range are about to be copied, the first of them for certain.
    fn note_copies(&self, range: PageRange) {
        let Ok(gate) = self.shared() else {
            return;
        };
        let mut copies = 0;
        gate.table().visit(range, |page, entry| {
            if let state @ PageState::Resident {
                skips,
                shared: true,
            } = entry.load()
            {
                copies += 1;
                if page == range.start {
                    let own = PageState::Resident {
                        skips: skips.max(1),
                        shared: false,
                    };
                    entry.replace(state, own);
                }
            }
            true
        });
        drop(gate);
        self.cow.written_to.store(range.end.0, Ordering::Relaxed);
        // The governor, who sees the kernel's faults, is not to count them again.
        self.sampling
            .counted_faults
            .fetch_add(copies, Ordering::Relaxed);
        self.resources.shared.lower(copies);
    }
}

/// Serves a write to a protected page: allows it, if there is room for the copy.
pub fn admit_write(
    group: &Group,
    space: &Arc<AddressSpace>,
    fault: Fault,
    admission: Admission,
) -> Served {
    let Ok(_gate) = space.shared() else {
        return Served::Done;
    };
    if fault.is_outdated(space) {
        wake(space, fault.page, 1);
        return Served::Done;
    }
    let shares = space.fork.family.has_others(space);
    if shares && must_wait(group, space, fault, admission) {
        return Served::Done;
    }
    let page = fault.page;
    let window = if shares {
        space.write_window(page)
    } else {
        space.clip(page, PageRange::around(page, ALONE_WINDOW))
    };
    let unprotect = |range: PageRange| {
        let uffd = space.uffd();
        uffd.unprotect(range.start.address(), bytes(range.pages()))
    };
    let mut result = unprotect(window);
    if result == Err(Errno::ENOENT) && window.pages() > 1 {
        // The window crosses into another mapping: the page itself may still do.
        result = unprotect(PageRange::around(page, 1));
    }
    match result {
        Ok(()) => {
            if shares {
                space.note_copies(window);
            }
            Served::Done
        }
        Err(errno) => after_failure(space, page, errno),
    }
}

/// The pages, as ranges.
fn ranges_of(pages: &[VirtualPage]) -> RangeSet {
    let mut ranges = RangeSet::default();
    for page in pages {
        ranges.add(PageRange::around(*page, 1));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn the_ends_of_threads_are_left_out() {
        let ends = ranges_of(&[3, 10, 14, 19, 40].map(VirtualPage));
        assert_eq!(
            ends.uncovered(range(10, 20)),
            [range(11, 14), range(15, 19)]
        );
        assert_eq!(ends.uncovered(range(20, 30)), [range(20, 30)]);
        assert_eq!(ends.uncovered(range(40, 41)), []);
    }
}
