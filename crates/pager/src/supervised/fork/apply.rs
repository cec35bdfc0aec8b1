//! Applying fork events: the page states that a child inherits.
//!
//! The fork event is read after the mappings were copied, and changes by other threads may be reported
//! before or after it. So a child inherits the page states as they were before any change of the same
//! read, with a record of these changes. Before its first fault is served, its mappings show which of
//! them it contains (`reconcile.rs`). Until then its page states do not change, because its only thread
//! waits for that fault.

use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::group::Group;
use crate::supervised::kernel::Userfaultfd;
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::fork_state::ForkState;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SHARED: PageState = PageState::Resident {
    skips: 0,
    shared: true,
};

/// Changes applied from the same read as forks. The thread that applies the events owns it.
#[derive(Default)]
pub(crate) struct ConcurrentChanges {
    /// The children, each with its fork's number and how many changes were read before the fork, once that is known.
    children: Vec<(Arc<AddressSpace>, u64, usize)>,
    history: Vec<Change>,
}

impl ConcurrentChanges {
    /// Records a change that is about to be applied.
    pub(crate) fn note(&mut self, change: Change) {
        match change {
            Change::Fork(number) => {
                let mut children = self.children.iter_mut();
                if let Some((_, _, forked_at)) = children.find(|(_, fork, _)| *fork == number) {
                    *forked_at = self.history.len();
                }
            }
            _ if self.children.is_empty() => {}
            change => self.history.push(change),
        }
    }

    /// Hands each child the changes that it may contain.
    pub(crate) fn finish(self) {
        for (child, _, forked_at) in self.children {
            let (before, after) = self.history.split_at(forked_at);
            // What `madvise` dropped after the fork, it dropped in the parent.
            let after = after.iter().filter(|change| change.needs_order());
            let history = before.iter().chain(after).copied().collect();
            *lock(&child.fork.inheritance) = Some(Inheritance { history, forked_at });
        }
    }
}

/// The state of a page in a child, with a slot reference of its own; `None` for a hole.
fn inherited(space: &AddressSpace, state: PageState) -> Option<PageState> {
    match state {
        PageState::Hole => None,
        // The same `skips` as the parent's, so that both copies are paged out together.
        PageState::Resident { skips, .. } => Some(PageState::Resident {
            skips,
            shared: true,
        }),
        // The batch is stale, so its pages stay in the parent's memory.
        PageState::Moving(_) => Some(SHARED),
        PageState::Swapped(slot, shadow) => {
            space.must_duplicate(slot);
            Some(PageState::Swapped(slot, shadow.without_sample()))
        }
        PageState::Filling(slot, _) => {
            space.must_duplicate(slot);
            Some(PageState::Swapped(slot, space.resources.refaults.shadow()))
        }
        PageState::Staged(_) | PageState::Returning(_) => {
            unreachable!("staged pages were stored")
        }
        PageState::Clearing => unreachable!("pages are cleared inside the gate"),
        removed @ PageState::Removed(_) => Some(removed),
    }
}

impl AddressSpace {
    /// Copies the page states to the table of a child; what is resident is shared then. Returns whether any page is
    /// stored, and how many are resident.
    fn copy_states(&self, gate: &Exclusive<'_>, child: &mut PageTable) -> (bool, u64) {
        let (mut any_stored, mut present) = (false, 0);
        gate.table().copy_to(child, |entry| {
            let state = entry.load();
            if let PageState::Resident {
                skips,
                shared: false,
            } = state
            {
                entry.set(PageState::Resident {
                    skips,
                    shared: true,
                });
            }
            // What is staged still was not stored: the child is killed.
            if matches!(state, PageState::Staged(_) | PageState::Returning(_)) {
                return None;
            }
            let state = inherited(self, state)?;
            any_stored |= matches!(state, PageState::Swapped(..));
            present += u64::from(matches!(state, PageState::Resident { .. }));
            Some(state)
        });
        (any_stored, present)
    }

    /// Creates the address space of a child. The kernel refused page changes since the fork, and the
    /// gate is held, so the parent's states are those of the child. If staged pages are lost, because
    /// the parent is gone, the child is killed at its first fault.
    pub(crate) fn apply_fork(
        self: &Arc<Self>,
        group: &Group,
        gate: &Exclusive<'_>,
        (uffd, port): (Userfaultfd, HelperPort),
        (number, concurrent): (u64, &mut ConcurrentChanges),
    ) -> Arc<AddressSpace> {
        debug_assert!(gate.is_of(self));
        // The parent runs already, so protect its pages first.
        self.fork.forked.store(true, Ordering::Relaxed);
        self.fork.sharing.note_fork();
        // The kernel copies the protection with the registration, which a prepared child does not inherit.
        let writable = self.cow.writable();
        let writable = writable.filter(|_| !self.resources.prepares_forks());
        self.cow.write_protected.store(false, Ordering::Relaxed);
        self.protect_if_near();
        let parents = self
            .attached()
            .map(|attached| attached.arena.beacon)
            .or(self.fork.beacon());
        // A prepared child has a beacon of its own.
        let beacon = parents.filter(|_| !self.resources.prepares_forks());
        let ancestors = self.ancestors_of_child(|id| group.space(id).is_some());
        let fork = ForkState::of_child(self.fork.family.clone(), ancestors, beacon);
        let (resources, id) = (self.resources.clone(), group.next_id());
        let mut child = AddressSpace::new(resources, id, (uffd, port), fork);
        // A child that has lost some may fork before it is killed.
        let lost = self.has_staged(gate) || self.fork.lost.load(Ordering::Relaxed);
        child.fork.lost.store(lost, Ordering::Relaxed);
        let (any_stored, present) = self.copy_states(gate, child.table.get_mut());
        *lock(&child.managed) = lock(&self.managed).clone();
        *lock(&child.thread_ends) = lock(&self.thread_ends).clone();
        *lock(&child.fork.inheritance) = Some(Inheritance::default());
        child.fork.awaits_comparison.store(true, Ordering::Relaxed);
        if self.let_go.is_asked_with_children() {
            // The thread that asked may be done by now.
            child.let_go.ask(true);
        }
        child
            .fork
            .inherited_stored
            .store(any_stored, Ordering::Relaxed);
        child.cow.set_writable(writable);
        let zeros = self.cow.protects_zeros.load(Ordering::Relaxed);
        child.cow.protects_zeros.store(zeros, Ordering::Relaxed);
        // Its parent's pages may have been when the kernel copied them.
        child.cow.any_protected.store(true, Ordering::Relaxed);
        child.fork.sharing.inherit(&self.fork.sharing);
        if !self.resources.prepares_forks() {
            child.sampling.inherit(&self.sampling);
        }
        // Later removals of the child must have numbers other than those it inherits.
        let removals = self.removed.count.load(Ordering::Relaxed);
        child.removed.count.store(removals, Ordering::Relaxed);
        // Both copies of a page should be paged out together.
        let hand = self.clock.hand.load(Ordering::Relaxed);
        child.clock.hand.store(hand, Ordering::Relaxed);
        // A parent that is gone has no resident pages left.
        let resident = present.max(self.resident_pages().max(0) as u64);
        child.set_resident_pages(resident);
        group.resources.shared.add_space(resident);
        let child = Arc::new(child);
        #[cfg(not(simulated))]
        self.note_origin();
        self.fork.family.join(self);
        self.fork.family.join(&child);
        if self.resources.prepares_forks() {
            child.protect_as_adopted();
        } else {
            child.protect_if_near();
        }
        let unmanaged = resident.saturating_sub(present);
        self.note_protected(unmanaged);
        child.note_protected(unmanaged);
        group.add_space(child.clone());
        concurrent.children.push((child.clone(), number, 0));
        child
    }
}
