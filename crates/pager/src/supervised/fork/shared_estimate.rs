//! How many pages are counted in more than one process because a fork shares them: the estimate.
//!
//! A count of the kernel's takes a while, and speaks of processes that may not be known here yet:
//! a child whose fork nobody has read halves what its parent seems to own. Taken for true, it would
//! let the group outgrow its limit by as much. So a count holds only if no fork was under way and
//! nobody came or left while it was made; what is not counted is kept up by what each of these
//! changes at most.

use crate::sync::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Default)]
pub struct SharedPages {
    /// Written under the lock, read by everybody at every fault.
    pages: AtomicU64,
    /// By how many pages it may be too low by now.
    doubt: AtomicU64,
    /// By how many it was lowered, ever.
    lowered: AtomicU64,
    members: Mutex<Members>,
}

/// What a count must not overlap.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Members {
    /// Forks that were read and are not applied yet.
    forking: u64,
    /// How often somebody came or left.
    changes: u64,
}

/// What was known when a count was begun.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    members: Members,
    lowered: u64,
}

/// A fork that was read and is not applied yet.
pub struct PendingFork(Arc<SharedPages>);

impl Drop for PendingFork {
    fn drop(&mut self) {
        let mut members = lock(&self.0.members);
        members.forking -= 1;
        members.changes += 1;
    }
}

impl SharedPages {
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// To be called as soon as a fork's event was read; until it is dropped, counts do not hold.
    pub fn begin_fork(self: &Arc<Self>) -> PendingFork {
        lock(&self.members).forking += 1;
        PendingFork(self.clone())
    }

    /// An address space came that shares all its pages with one other.
    pub fn add_space(&self, pages: u64) {
        let mut members = lock(&self.members);
        members.changes += 1;
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// An address space leaves that shared some of its pages: at most as many as `uncharge`, which
    /// takes it out of the sum, returns. Others see neither without the other.
    pub fn remove_space(&self, uncharge: impl FnOnce() -> u64) {
        let mut members = lock(&self.members);
        members.changes += 1;
        self.lower_at_most(uncharge());
    }

    /// Pages stopped being shared, so many at most.
    pub fn lower_at_most(&self, pages: u64) {
        self.doubt.fetch_add(pages, Ordering::Relaxed);
        self.lower(pages);
    }

    /// By how many pages the estimate may be too low.
    pub fn doubt(&self) -> u64 {
        self.doubt.load(Ordering::Relaxed)
    }

    /// So many pages stopped being shared.
    pub fn lower(&self, pages: u64) {
        self.lowered.fetch_add(pages, Ordering::Relaxed);
        let lower = |shared: u64| Some(shared.saturating_sub(pages));
        // Never fails, as the closure always answers.
        let _ = self
            .pages
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
    }

    /// No more than so many pages were shared by those who were there.
    pub fn bound(&self, pages: u64, begun: Begun) {
        if *lock(&self.members) == begun.members {
            self.pages.fetch_min(pages, Ordering::Relaxed);
        }
    }

    /// Before a count: `None` while it would not hold.
    pub fn begin(&self) -> Option<Begun> {
        let members = *lock(&self.members);
        let lowered = self.lowered.load(Ordering::Relaxed);
        (members.forking == 0).then_some(Begun { members, lowered })
    }

    /// Takes a count, if it holds. `false` if not.
    pub fn set(&self, pages: u64, begun: Begun) -> bool {
        let members = lock(&self.members);
        let holds = *members == begun.members;
        if holds {
            // Of what stopped being shared meanwhile, it is not known what was counted.
            let meanwhile = self.lowered.load(Ordering::Relaxed) - begun.lowered;
            let pages = pages.saturating_sub(meanwhile);
            self.pages.store(pages, Ordering::Relaxed);
            self.doubt.store(meanwhile, Ordering::Relaxed);
        }
        holds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_beside_a_fork_does_not_hold() {
        let shared = Arc::new(SharedPages::default());
        let before = shared.begin().unwrap();
        let fork = shared.begin_fork();
        assert!(shared.begin().is_none());
        assert!(!shared.set(50, before), "the child is not known");
        shared.add_space(100);
        assert!(!shared.set(50, before));
        drop(fork);
        assert!(!shared.set(50, before), "it came during the count");
        assert_eq!(shared.pages(), 100);
        let after = shared.begin().unwrap();
        assert!(shared.set(90, after));
        assert_eq!(shared.pages(), 90);
    }

    #[test]
    fn a_count_beside_a_departure_does_not_hold() {
        let shared = SharedPages::default();
        shared.add_space(100);
        let before = shared.begin().unwrap();
        shared.remove_space(|| 60);
        assert!(!shared.set(100, before), "it counts who left");
        assert_eq!(shared.pages(), 40);
        shared.remove_space(|| 60);
        assert_eq!(shared.pages(), 0);
    }

    #[test]
    fn faults_lower_what_was_counted() {
        let shared = SharedPages::default();
        assert!(shared.set(30, shared.begin().unwrap()));
        let begun = shared.begin().unwrap();
        shared.lower_at_most(10);
        assert_eq!((shared.pages(), shared.doubt()), (20, 10));
        shared.lower(5);
        assert_eq!((shared.pages(), shared.doubt()), (15, 10));
        assert!(shared.set(25, begun), "no one came or left");
        assert_eq!(
            (shared.pages(), shared.doubt()),
            (10, 15),
            "of 25, or of 10"
        );
        assert!(shared.set(12, shared.begin().unwrap()));
        assert_eq!((shared.pages(), shared.doubt()), (12, 0));
    }
}
