//! Estimate of the pages that are charged to more than one program because a fork shares them.
//!
//! A count takes time. One of the frames that known address spaces share is of these alone, whatever others the kernel
//! knows; who is added meanwhile shares everything at first, and what may have stopped being shared meanwhile is taken
//! off.
//!
//! The kernel's proportional sizes include processes that are not known here yet: a child whose
//! fork event was not read halves its parent's PSS. Such a count would let the group outgrow its limit.
//! So it is valid only if no fork was pending and no address space was added or removed during it.
//! Between counts, forks, exits and COW breaks adjust the estimate by their bounds.

use crate::sync::{Mutex, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The estimate. Any thread uses it. All atomics are Relaxed: `members` orders counts against forks and
/// exits.
#[derive(Default)]
pub(crate) struct SharedPages {
    /// The estimate, read at every fault. Counts set it under the lock; COW breaks lower it without.
    pages: AtomicU64,
    /// Number of pages by which the estimate may be too low.
    uncertainty: AtomicU64,
    /// Sum of all pages by which the estimate was lowered.
    lowered: AtomicU64,
    /// Sum of all pages by which address spaces that were added raised it.
    added: AtomicU64,
    members: Mutex<Members>,
}

/// State that must not change during a count.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Members {
    /// Fork events read and not applied yet.
    forking: u64,
    /// Number of address spaces added or removed so far.
    changes: u64,
}

/// The state at the start of a count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CountStart {
    members: Members,
    lowered: u64,
    added: u64,
}

impl CountStart {
    /// Whether what was counted since is of all `members`: no fork was pending then, and no address space was added
    /// or removed since.
    fn is_of(&self, members: &Members) -> bool {
        members.forking == 0 && self.members == *members
    }
}

/// A fork event that was read and is not applied yet. Counts are invalid until it is dropped.
pub(crate) struct PendingFork(Arc<SharedPages>);

impl Drop for PendingFork {
    fn drop(&mut self) {
        let mut members = lock(&self.0.members);
        members.forking -= 1;
        members.changes += 1;
    }
}

impl SharedPages {
    /// The estimate in pages.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Notes that a fork event was read.
    pub(crate) fn begin_fork(self: &Arc<Self>) -> PendingFork {
        lock(&self.members).forking += 1;
        PendingFork(self.clone())
    }

    /// Notes a child that shares all its `pages` with its parent.
    pub(crate) fn add_space(&self, pages: u64) {
        let mut members = lock(&self.members);
        members.changes += 1;
        self.added.fetch_add(pages, Ordering::Relaxed);
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Notes an exit or exec. `uncharge` removes the address space's charge and returns the most pages
    /// that it shared. The lock makes both one step for counts.
    pub(crate) fn remove_space(&self, uncharge: impl FnOnce() -> u64) {
        let mut members = lock(&self.members);
        members.changes += 1;
        self.lower_at_most(uncharge());
    }

    /// Lowers the estimate by `pages`, the most that may have stopped being shared.
    pub(crate) fn lower_at_most(&self, pages: u64) {
        self.uncertainty.fetch_add(pages, Ordering::Relaxed);
        self.lower(pages);
    }

    /// The most pages that may be shared.
    pub(crate) fn most(&self) -> u64 {
        self.pages().saturating_add(self.uncertainty())
    }

    /// Number of pages by which the estimate may be too low.
    pub(crate) fn uncertainty(&self) -> u64 {
        self.uncertainty.load(Ordering::Relaxed)
    }

    /// Lowers the estimate by `pages` that stopped being shared.
    pub(crate) fn lower(&self, pages: u64) {
        self.lowered.fetch_add(pages, Ordering::Relaxed);
        let lower = |shared: u64| Some(shared.saturating_sub(pages));
        // The closure always returns `Some`, so the update succeeds.
        let _ = self
            .pages
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
    }

    /// Lowers the estimate, and the most that may be shared, to an upper bound computed since `start`, if
    /// that is still valid.
    pub(crate) fn bound(&self, pages: u64, start: CountStart) {
        let members = lock(&self.members);
        if start.is_of(&members) {
            let before = self.pages.fetch_min(pages, Ordering::Relaxed);
            let above = pages.saturating_sub(before);
            self.uncertainty.fetch_min(above, Ordering::Relaxed);
        }
    }

    /// Starts a count.
    pub(crate) fn begin_count(&self) -> CountStart {
        let members = lock(&self.members);
        CountStart {
            members: *members,
            lowered: self.lowered.load(Ordering::Relaxed),
            added: self.added.load(Ordering::Relaxed),
        }
    }

    /// Whether no fork was pending at `start`, and no address space was added or removed since.
    pub(crate) fn is_valid(&self, start: CountStart) -> bool {
        start.is_of(&lock(&self.members))
    }

    /// Sets the estimate to a count of proportional sizes begun at `start`. `false` if it is not valid any more.
    pub(crate) fn set(&self, pages: u64, start: CountStart) -> bool {
        let members = lock(&self.members);
        let is_valid = start.is_of(&members);
        if is_valid {
            // The count may or may not include COW breaks that happened during it.
            let meanwhile = self.lowered.load(Ordering::Relaxed) - start.lowered;
            let pages = pages.saturating_sub(meanwhile);
            self.pages.store(pages, Ordering::Relaxed);
            self.uncertainty.store(meanwhile, Ordering::Relaxed);
        }
        is_valid
    }

    /// Sets the estimate to what the address spaces share that were known before `start`, at which the count of their
    /// frames began.
    pub(crate) fn set_among_known(&self, pages: u64, start: CountStart) {
        let _members = lock(&self.members);
        let added = self.added.load(Ordering::Relaxed) - start.added;
        let meanwhile = self.lowered.load(Ordering::Relaxed) - start.lowered;
        let most = pages + added;
        // What ended during the count is in it or not. The estimate knows better if it has followed that.
        let followed = match meanwhile {
            0 => 0,
            _ => self.pages().min(most),
        };
        let pages = most.saturating_sub(meanwhile).max(followed);
        self.pages.store(pages, Ordering::Relaxed);
        self.uncertainty.store(most - pages, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_during_a_fork_is_invalid() {
        let shared = Arc::new(SharedPages::default());
        let before = shared.begin_count();
        let fork = shared.begin_fork();
        let during = shared.begin_count();
        assert!(!shared.is_valid(during) && !shared.set(50, during));
        assert!(!shared.is_valid(before));
        assert!(!shared.set(50, before), "the child is not known");
        shared.add_space(100);
        assert!(!shared.set(50, before));
        drop(fork);
        assert!(
            !shared.set(50, before),
            "the child was added during the count"
        );
        assert_eq!(shared.pages(), 100);
        let after = shared.begin_count();
        assert!(shared.is_valid(after));
        assert!(shared.set(90, after));
        assert_eq!(shared.pages(), 90);
    }

    #[test]
    fn a_count_during_an_exit_is_invalid() {
        let shared = SharedPages::default();
        shared.add_space(100);
        let before = shared.begin_count();
        shared.remove_space(|| 60);
        assert!(!shared.set(100, before), "it includes the exited program");
        assert_eq!(shared.pages(), 40);
        shared.remove_space(|| 60);
        assert_eq!(shared.pages(), 0);
    }

    #[test]
    fn faults_lower_what_was_counted() {
        let shared = SharedPages::default();
        assert!(shared.set(30, shared.begin_count()));
        let begun = shared.begin_count();
        shared.lower_at_most(10);
        assert_eq!((shared.pages(), shared.uncertainty()), (20, 10));
        shared.lower(5);
        assert_eq!((shared.pages(), shared.uncertainty()), (15, 10));
        assert_eq!(shared.most(), 25);
        shared.bound(22, shared.begin_count());
        assert_eq!((shared.pages(), shared.most()), (15, 22));
        shared.bound(12, shared.begin_count());
        assert_eq!((shared.pages(), shared.most()), (12, 12));
        assert!(
            shared.set(25, begun),
            "no address space was added or removed"
        );
        assert_eq!(
            (shared.pages(), shared.uncertainty()),
            (10, 15),
            "of 25, or of 10"
        );
        assert!(shared.set(12, shared.begin_count()));
        assert_eq!((shared.pages(), shared.uncertainty()), (12, 0));
    }

    #[test]
    fn a_count_of_frames_holds_whatever_forks_and_ends_during_it() {
        let shared = Arc::new(SharedPages::default());
        let _fork = shared.begin_fork();
        let begun = shared.begin_count();
        shared.add_space(100);
        shared.set_among_known(30, begun);
        assert_eq!((shared.pages(), shared.most()), (130, 130));
        let begun = shared.begin_count();
        shared.remove_space(|| 20);
        shared.set_among_known(130, begun);
        assert_eq!((shared.pages(), shared.most()), (110, 130));
        let begun = shared.begin_count();
        shared.remove_space(|| 60);
        shared.set_among_known(70, begun);
        assert_eq!((shared.pages(), shared.most()), (50, 70), "60 of 110 ended");
        shared.set_among_known(20, shared.begin_count());
        assert_eq!((shared.pages(), shared.most()), (20, 20));
    }
}
