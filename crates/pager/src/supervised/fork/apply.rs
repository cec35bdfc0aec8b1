//! Applying fork events: the page states that a child inherits.
//!
//! The fork event is read after the mappings were copied, and changes by other threads may be reported
//! before or after it. So a child inherits the page states as of the event, with a record of every
//! change that was applied from the same read. Before its first fault is served, its mappings show
//! which of these it contains (`reconcile.rs`). Until then its page states do not change, because its
//! only thread waits for that fault.

use crate::page::VirtualPage;
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::{AppliedBefore, Inheritance};
use crate::supervised::fork::reconcile::known_resident;
use crate::supervised::fork::snapshot::RecordedChange;
use crate::supervised::group::Group;
use crate::supervised::kernel::Userfaultfd;
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::fork_state::ForkState;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::Slot;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SHARED: PageState = PageState::Resident {
    skips: 0,
    shared: true,
};

/// Changes applied from the same read as a fork. The thread that applies the events owns it.
#[derive(Default)]
pub(crate) struct ConcurrentChanges {
    before: Vec<AppliedBefore>,
    /// The children so far, each with the length of `after` at its fork.
    children: Vec<(Arc<AddressSpace>, usize)>,
    after: Vec<RecordedChange>,
    /// A page that a child may have inherited is lost.
    lost: bool,
}

impl ConcurrentChanges {
    /// Records a change that is about to be applied, before a fork or after one.
    pub(crate) fn note(
        &mut self,
        space: &AddressSpace,
        gate: &Exclusive<'_>,
        change: Change,
        before_a_fork: bool,
    ) {
        let parts = match change {
            // The registered ranges of the child show whether it contains the unmapping. Unmanaged
            // memory has no page states to reconcile. (Where forks are prepared, marks show what is not managed, too.)
            Change::Unmap(range) => {
                let mut parts = lock(&space.managed).covered(range);
                let marked = lock(&space.prepared.marked).covered(range);
                let managed = lock(&space.managed).clone();
                parts.extend(marked.iter().flat_map(|part| managed.uncovered(*part)));
                parts.into_iter().map(Change::Unmap).collect()
            }
            Change::Remap { .. } => vec![change],
            Change::Remove(_) | Change::Fork(_) => Vec::new(),
        };
        if !before_a_fork && self.children.is_empty() {
            return;
        }
        for change in parts {
            let resident = match change {
                Change::Unmap(range) | Change::Remap { from: range, .. } => {
                    known_resident(gate, range)
                }
                Change::Remove(_) | Change::Fork(_) => RangeSet::default(),
            };
            let recorded = RecordedChange { change, resident };
            if before_a_fork {
                self.before_a_fork(space, gate, recorded.clone());
            }
            if !self.children.is_empty() {
                self.after.push(recorded);
            }
        }
    }

    fn before_a_fork(
        &mut self,
        space: &AddressSpace,
        gate: &Exclusive<'_>,
        recorded: RecordedChange,
    ) {
        let (mut states, mut is_managed) = (Vec::new(), true);
        if let Change::Unmap(range) = recorded.change {
            is_managed = lock(&space.managed).covered(range) == [range];
            gate.table().visit(range, |page, entry| {
                match entry.load() {
                    // The parent is gone, so the stage could not be read.
                    PageState::Staged(_) | PageState::Returning(_) => self.lost = true,
                    state => states.extend(inherited(space, state).map(|state| (page, state))),
                }
                true
            });
        }
        self.before.push(AppliedBefore {
            recorded,
            states,
            is_managed,
        });
    }

    /// Adds a new child.
    pub(crate) fn add_child(&mut self, child: &Arc<AddressSpace>) {
        let copies = self.before.iter().map(|applied| AppliedBefore {
            recorded: applied.recorded.clone(),
            states: copied(applied, child),
            is_managed: applied.is_managed,
        });
        if let Some(inheritance) = &mut *lock(&child.fork.inheritance) {
            inheritance.before = copies.collect();
        }
        child.fork.lost.fetch_or(self.lost, Ordering::Relaxed);
        self.children.push((child.clone(), self.after.len()));
    }

    /// Hands each child the changes applied after its fork.
    pub(crate) fn finish(self, space: &AddressSpace) {
        for (child, from) in self.children {
            if let Some(inheritance) = &mut *lock(&child.fork.inheritance) {
                inheritance.after = self.after[from..].to_vec();
            }
        }
        let slots: Vec<Slot> = self.before.iter().flat_map(AppliedBefore::slots).collect();
        space.resources.swap.release_bulk(&slots);
    }
}

/// A copy of the page states of a change, with slot references of its own.
fn copied(applied: &AppliedBefore, space: &AddressSpace) -> Vec<(VirtualPage, PageState)> {
    for slot in applied.slots() {
        space.must_duplicate(slot);
    }
    applied.states.clone()
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
    /// Creates the address space of a child. The kernel refused page changes since the fork, and the
    /// gate is held, so the parent's states are those of the child. If staged pages are lost, because
    /// the parent is gone, the child is killed at its first fault.
    pub(crate) fn apply_fork(
        self: &Arc<Self>,
        group: &Group,
        gate: &Exclusive<'_>,
        (uffd, port): (Userfaultfd, HelperPort),
        concurrent: &mut ConcurrentChanges,
    ) -> Arc<AddressSpace> {
        debug_assert!(gate.is_of(self));
        // The parent runs already, so protect its pages first.
        self.fork.forked.store(true, Ordering::Relaxed);
        self.cow.write_protected.store(false, Ordering::Relaxed);
        self.protect_if_near();
        let parents = self
            .attached()
            .map(|attached| attached.arena.beacon)
            .or(self.fork.beacon());
        // A prepared child has a beacon of its own.
        let beacon = parents.filter(|_| !self.resources.prepares_forks());
        let fork = ForkState::of_child(self.fork.family.clone(), beacon);
        let (resources, id) = (self.resources.clone(), group.next_id());
        let mut child = AddressSpace::new(resources, id, (uffd, port), fork);
        let lost = self.has_staged(gate);
        child.fork.lost.store(lost, Ordering::Relaxed);
        let (mut any_stored, mut present) = (false, 0);
        let inherits = child.table.get_mut();
        gate.table().visit(PageTable::everything(), |page, entry| {
            let state = entry.load();
            if let PageState::Resident { skips, .. } = state {
                entry.set(PageState::Resident {
                    skips,
                    shared: true,
                });
            }
            if !matches!(state, PageState::Staged(_) | PageState::Returning(_))
                && let Some(state) = inherited(self, state)
            {
                any_stored |= matches!(state, PageState::Swapped(..));
                present += u64::from(matches!(state, PageState::Resident { .. }));
                inherits.entry(page).set(state);
            }
            true
        });
        *lock(&child.managed) = lock(&self.managed).clone();
        *lock(&child.thread_ends) = lock(&self.thread_ends).clone();
        *lock(&child.fork.inheritance) = Some(Inheritance::default());
        child
            .fork
            .inherited_stored
            .store(any_stored, Ordering::Relaxed);
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
        self.fork.family.join(self);
        self.fork.family.join(&child);
        child.protect_if_near();
        group.add_space(child.clone());
        concurrent.add_child(&child);
        child
    }
}
