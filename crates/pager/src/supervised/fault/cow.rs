//! Admission of COW copies under the limit, of what forks share and of the kernel's page of zeros.
//!
//! After a fork, the kernel copies a page on the first write, without a userfaultfd message and faster
//! than pages can be reclaimed. So if the copies might exceed the limit, both sides are write-protected
//! at the fork, or once the group comes near its limit. The first write then raises a fault, which
//! waits for room.
//!
//! The same goes for pages that were read and never written: the page of zeros takes no memory, its copy does.
//!
//! No page state depends on the protection, so a page may be unprotected at any time. Protection that
//! the kernel loses (`UFFDIO_MOVE`) or refuses (mappings are changing) only lets a copy pass without
//! admission.
//!
//! To protect all that is managed takes the kernel a walk over the page tables, on both sides of each fork. But a
//! child that the kernel reports inherits the protection, and the parent keeps it. So what became writable since is
//! remembered, and protected alone. Where that is little it stays writable: it is what the program writes all the
//! time, and would fault again after each fork.
//!
//! Where accesses are tracked (`reclaim/accesses.rs`) memory cannot be protected: copies after forks do not wait, and a first
//! read takes memory at once.
//!
//! The last pages of thread stacks (`registration/vma_scan.rs`) are never protected: the kernel writes
//! there at thread exit without waiting for a userfaultfd. The helper, which writes to break COW of
//! victims, never waits for room, because it makes room.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::PageState;
use crate::range_set::RangeSet;
use crate::supervised::fault::message::{Admission, Fault, Resolution};
use crate::supervised::fault::primitives::{after_failure, wake};
use crate::supervised::fault::room::{Charged, must_wait};
use crate::supervised::group::Group;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::reclaim::batch::Run;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::{Errno, PAGE_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages unprotected per fault of a sequential writer. A larger window saves faults and copies more
/// pages without admission.
const WRITE_WINDOW: u64 = 16;
/// Pages unprotected per fault if no relative lives, so that nothing is copied. A larger window saves
/// faults.
const UNSHARED_WINDOW: u64 = 512;
/// The share of the limit that may be copied without admission after forks is one in so many, divided by the
/// programs of the family. A smaller value saves faults and lets forks exceed the limit by more.
const UNADMITTED_SHARE: u64 = 128;

impl AddressSpace {
    /// Calls [`AddressSpace::protect_if_near`] if the pages are not protected since the last fork, and
    /// a relative lives that may share them.
    pub(crate) fn protect_shared(&self) {
        if !self.cow.write_protected.load(Ordering::Relaxed)
            && self.fork.forked.load(Ordering::Relaxed)
            && !self.is_dead()
            && self.fork.family.has_others(self)
        {
            self.protect_if_near();
        }
    }

    /// Whether copying all resident pages would take the group over its limit.
    fn is_near_limit(&self) -> bool {
        let copies = bytes(self.resident_pages().max(0) as u64);
        let resources = &self.resources;
        resources.resident_bytes() + copies > resources.resident_limit_bytes()
    }

    /// Has the child of a prepared fork protected as it is registered, if it is near the limit.
    pub(crate) fn protect_as_adopted(&self) {
        if self.is_near_limit() && !self.resources.tracks_accesses() {
            self.cow.write_protected.store(true, Ordering::Relaxed);
            self.cow.set_writable(Some(RangeSet::default()));
        }
    }

    /// Write-protects the managed ranges, or what of them is writable, if the group is near its limit.
    pub(crate) fn protect_if_near(&self) {
        if self.is_held() || self.resources.tracks_accesses() || !self.is_near_limit() {
            return;
        }
        let ranges = lock(&self.managed).ranges().to_vec();
        if ranges.is_empty() {
            return;
        }
        // Set before protecting, so that a concurrent fork, which clears it, is not missed.
        self.cow.write_protected.store(true, Ordering::Relaxed);
        let ranges = match self.cow.writable() {
            Some(writable) if writable.pages() <= self.may_stay_writable() => return,
            Some(writable) => writable.ranges().to_vec(),
            None => ranges,
        };
        self.cow.set_writable(Some(RangeSet::default()));
        if !self.protect(&ranges) {
            self.forget_protection();
        }
    }

    /// After a fork: what is managed is protected, if it is, so that no more copies are made unseen than of `unmanaged` pages and
    /// of those that stayed writable.
    pub(crate) fn note_protected(&self, unmanaged: u64) {
        if self.cow.write_protected.load(Ordering::Relaxed)
            && let Some(writable) = self.cow.writable()
        {
            self.fork
                .sharing
                .note_protected(unmanaged + writable.pages());
        }
    }

    /// Number of pages that are not worth protecting.
    fn may_stay_writable(&self) -> u64 {
        let limit = self.resources.resident_limit_bytes() / PAGE_SIZE as u64;
        limit / UNADMITTED_SHARE / self.fork.family.living().max(1)
    }

    /// All that is managed is to be protected, if anything.
    fn forget_protection(&self) {
        self.cow.write_protected.store(false, Ordering::Relaxed);
        self.cow.set_writable(None);
        self.fork.sharing.note_unprotected();
    }

    /// Protects a range that becomes managed, if the others are protected.
    pub(crate) fn protect_new(&self, range: PageRange) {
        if !self.cow.write_protected.load(Ordering::Relaxed) {
            self.cow.note_writable(range);
        } else if !self.protect(&[range]) {
            self.forget_protection();
        }
    }

    /// Has the first write to each page of zeros in a range wait for room.
    pub(crate) fn protect_zeros(&self, range: PageRange) {
        if self.resources.tracks_accesses() {
            return;
        }
        self.cow.protects_zeros.store(true, Ordering::Relaxed);
        if !self.protect(&[range]) {
            self.cow.note_writable(range);
        }
    }

    /// The pages of zeros in a range, of which the first write takes memory; none where the kernel does not tell.
    fn protected_zeros(&self, range: PageRange) -> RangeSet {
        if !self.cow.protects_zeros.load(Ordering::Relaxed) {
            return RangeSet::default();
        }
        let zeros = self
            .inspector()
            .and_then(|inspector| inspector.zero_pages(range).ok());
        zeros.unwrap_or_default()
    }

    /// What to unprotect at a write to `page`, and the pages of zeros in it. Where nothing is shared, all around it that takes
    /// no memory.
    fn admitted_window(&self, page: VirtualPage, shares: bool) -> (PageRange, RangeSet) {
        if shares {
            let window = self.write_window(page);
            return (window, self.protected_zeros(window));
        }
        let around = self.clip(page, PageRange::around(page, UNSHARED_WINDOW));
        let zeros = self.protected_zeros(around);
        if zeros.containing(page).is_some() {
            let window = self.write_window(page);
            return (window, within(&zeros, window));
        }
        let free = zeros.uncovered(around);
        let free = free.into_iter().find(|part| part.contains(page));
        (
            free.unwrap_or(PageRange::around(page, 1)),
            RangeSet::default(),
        )
    }

    /// Allows writes to all that is managed, as to a program that is held: a tracer's write would fail, not wait. What
    /// cannot be unprotected as mappings are changing, and what other threads were about to protect, is left to the next
    /// call.
    pub(crate) fn unprotect_managed(&self) {
        if !self.cow.any_protected.swap(false, Ordering::Relaxed) {
            return;
        }
        self.forget_protection();
        let ranges = lock(&self.managed).ranges().to_vec();
        for range in ranges {
            if self.uffd().unprotect(range) == Err(Errno::EAGAIN) {
                self.cow.any_protected.store(true, Ordering::Relaxed);
            }
        }
    }

    /// `false` if the kernel refuses, as mappings are changing or have changed, and while a tracer holds the program: some
    /// of it may be writable.
    fn protect(&self, ranges: &[PageRange]) -> bool {
        if self.is_held() {
            return false;
        }
        let is_protected = self.request_protection(ranges);
        // A tracer may hold the program by now.
        self.cow.any_protected.store(true, Ordering::Relaxed);
        is_protected
    }

    fn request_protection(&self, ranges: &[PageRange]) -> bool {
        let ends = lock(&self.thread_ends).clone();
        for range in ranges {
            let first = ends.partition_point(|end| *end < range.start);
            let after = ends.partition_point(|end| *end < range.end);
            for part in ranges_of(&ends[first..after]).uncovered(*range) {
                if self.uffd().protect(part).is_err() {
                    return false;
                }
            }
        }
        true
    }

    /// Unprotects the pages whose COW the next command breaks, so that the helper's writes raise no
    /// faults.
    pub(crate) fn unprotect_for_cow_break(&self, moves: &[Run]) {
        let mut breaks = moves.iter().filter(|run| run.place.is_none()).peekable();
        if breaks.peek().is_some() && !Bug::HelperUnguarded.is_back() {
            self.guard_helper();
        }
        // A child inherits the protection of its parent's pages. Elsewhere pinned pages are taken for
        // shared ones.
        if self.fork.forked.load(Ordering::Relaxed) {
            for run in breaks {
                // On failure the helper's write faults and is served.
                let _ = self.uffd().unprotect(run.range());
            }
        }
    }

    /// The admission of faults of a thread.
    pub(crate) fn admission_of(&self, thread: u32) -> Admission {
        if thread != 0 && self.helper.load(Ordering::Relaxed) == thread {
            Admission::OfHelper
        } else {
            Admission::MayDefer
        }
    }

    /// The window to unprotect at a write to `page`: larger for a sequential writer.
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

    /// Counts the shared pages of a range that are about to be copied, the first of them for certain. Pages of zeros were
    /// no memory that was shared.
    fn note_copies(&self, gate: &Shared<'_>, range: PageRange, zeros: &RangeSet) {
        let mut copies = 0;
        gate.table().visit(range, |page, entry| {
            if let state @ PageState::Resident {
                skips,
                shared: true,
            } = entry.load()
            {
                copies += u64::from(zeros.containing(page).is_none());
                if page == range.start {
                    let private = PageState::Resident {
                        skips: skips.max(1),
                        shared: false,
                    };
                    entry.replace(state, private);
                }
            }
            true
        });
        // The governor samples minor faults, which include these copies, and must not count them again.
        self.sampling
            .counted_faults
            .fetch_add(copies, Ordering::Relaxed);
        self.resources.shared.lower(copies);
    }
}

/// Serves a write to a protected page: unprotects it if there is room for the copy, if there will be one.
pub(crate) fn admit_write(
    group: &Group,
    gate: &Shared<'_>,
    space: &Arc<AddressSpace>,
    fault: Fault,
    admission: Admission,
) -> Resolution {
    debug_assert!(gate.is_of(space));
    if fault.is_outdated(space) {
        wake(space, fault.page, 1);
        return Resolution::Done;
    }
    let shares = space.fork.family.has_others(space);
    let page = fault.page;
    let (mut window, mut zeros) = space.admitted_window(page, shares);
    let takes_memory = shares || zeros.pages() > 0;
    if takes_memory && must_wait(group, space, fault, admission) {
        return Resolution::Queued;
    }
    let charged = Charged::new(space, zeros.pages());
    let unprotect = |range: PageRange| space.uffd().unprotect(range);
    let mut result = unprotect(window);
    if result == Err(Errno::ENOENT) && window.pages() > 1 {
        // The window may cross into another mapping; the page alone may still be unprotected.
        window = PageRange::around(page, 1);
        zeros = within(&zeros, window);
        result = unprotect(window);
    }
    match result {
        Ok(()) => {
            space.cow.note_writable(window);
            space.cow.written_to.store(window.end.0, Ordering::Relaxed);
            if shares {
                space.note_copies(gate, window, &zeros);
            }
            // Not to be taken for copies of shared pages.
            let counted = &space.sampling.counted_faults;
            counted.fetch_add(zeros.pages(), Ordering::Relaxed);
            charged.end(zeros.pages());
            Resolution::Done
        }
        Err(errno) => after_failure(space, page, errno),
    }
}

/// What of a set is in a range.
fn within(set: &RangeSet, range: PageRange) -> RangeSet {
    set.covered(range).into_iter().collect()
}

/// The pages as a set of ranges.
fn ranges_of(pages: &[VirtualPage]) -> RangeSet {
    let pages = pages.iter();
    pages.map(|page| PageRange::around(*page, 1)).collect()
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
