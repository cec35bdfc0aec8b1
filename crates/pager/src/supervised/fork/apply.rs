//! Forks: what a child inherits.
//!
//! The event of a fork is read after the mappings were copied, and other threads' changes of the
//! mappings may be reported on either side of it. So a child inherits the page states as of the
//! event, with a note of every change that was applied in the same breath, before or after; and
//! before its first fault is served, its own mappings say which of these it saw. Until then it
//! stands still, as it has one thread, and that one waits.

use crate::page::VirtualPage;
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::{AppliedBefore, Inheritance};
use crate::supervised::fork::reconcile::known_resident;
use crate::supervised::fork::snapshot::Noted;
use crate::supervised::group::Group;
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::fork_state::ForkState;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_swap::Slot;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SHARED: PageState = PageState::Resident {
    skips: 0,
    shared: true,
};

/// The changes that were applied beside the forks of one reading.
#[derive(Default)]
pub struct ConcurrentChanges {
    before: Vec<AppliedBefore>,
    /// The children so far, each with how many of `after` came before it.
    children: Vec<(Arc<AddressSpace>, usize)>,
    after: Vec<Noted>,
    /// Something that a child may have is lost.
    lost: bool,
}

impl ConcurrentChanges {
    /// Notes a change that is about to be applied, before a fork or after one.
    pub fn note(
        &mut self,
        space: &AddressSpace,
        gate: &Exclusive<'_>,
        change: Change,
        before_a_fork: bool,
    ) {
        let parts = match change {
            // Which child saw it is told by what is registered there. Of other memory, the end of a
            // mapping that may not be touched, say, nothing is known.
            Change::Unmap(range) => {
                let parts = lock(&space.managed).covered(range);
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
            let noted = Noted { change, resident };
            if before_a_fork {
                self.before_a_fork(space, gate, noted.clone());
            }
            if !self.children.is_empty() {
                self.after.push(noted);
            }
        }
    }

    fn before_a_fork(&mut self, space: &AddressSpace, gate: &Exclusive<'_>, noted: Noted) {
        let mut states = Vec::new();
        if let Change::Unmap(range) = noted.change {
            gate.table().visit(range, |page, entry| {
                match entry.load() {
                    // Of a parent that is gone already: nobody has it any more.
                    PageState::Staged(_) | PageState::Returning(_) => self.lost = true,
                    state => states.extend(inherited(space, state).map(|state| (page, state))),
                }
                true
            });
        }
        self.before.push(AppliedBefore { noted, states });
    }

    /// Notes a child as it is made.
    pub fn add_child(&mut self, child: &Arc<AddressSpace>) {
        let copies = self.before.iter().map(|beside| AppliedBefore {
            noted: beside.noted.clone(),
            states: copied(beside, child),
        });
        if let Some(inheritance) = &mut *lock(&child.fork.inheritance) {
            inheritance.before = copies.collect();
        }
        child.fork.lost.fetch_or(self.lost, Ordering::Relaxed);
        self.children.push((child.clone(), self.after.len()));
    }

    /// All is applied: the children learn what came after them.
    pub fn finish(self, space: &AddressSpace) {
        for (child, from) in self.children {
            if let Some(inheritance) = &mut *lock(&child.fork.inheritance) {
                inheritance.after = self.after[from..].to_vec();
            }
        }
        let slots: Vec<Slot> = self.before.iter().flat_map(AppliedBefore::slots).collect();
        space.resources.swap.release_bulk(&slots);
    }
}

/// The page states of a change, with counts of their own.
fn copied(applied: &AppliedBefore, space: &AddressSpace) -> Vec<(VirtualPage, PageState)> {
    for slot in applied.slots() {
        space.must_duplicate(slot);
    }
    applied.states.clone()
}

/// The state in which another owner has a page, with a count of its own; `None` where there is
/// nothing to have.
fn inherited(space: &AddressSpace, state: PageState) -> Option<PageState> {
    match state {
        PageState::Hole => None,
        // As old as the parent's, so that both go out together.
        PageState::Resident { skips, .. } => Some(PageState::Resident {
            skips,
            shared: true,
        }),
        // Of a batch, the pages are still in the parent's memory: it is stale.
        PageState::Moving(_) => Some(SHARED),
        PageState::Swapped(slot) | PageState::Filling(slot, _) => {
            space.must_duplicate(slot);
            Some(PageState::Swapped(slot))
        }
        PageState::Staged(_) | PageState::Returning(_) => {
            unreachable!("staged pages were stored")
        }
        PageState::Clearing => unreachable!("pages are cleared inside the gate"),
        removed @ PageState::Removed(_) => Some(removed),
    }
}

impl AddressSpace {
    /// The child sees every page as it was at the fork. No page was copied in or moved out since
    /// (the kernel refused, or the gate was held), so the states here are the child's. If staged
    /// pages are lost, as the parent is gone already, the child is stopped at its first fault.
    pub fn apply_fork(
        self: &Arc<Self>,
        group: &Group,
        gate: &Exclusive<'_>,
        (uffd, port): (OwnedFd, HelperPort),
        beside: &mut ConcurrentChanges,
    ) -> Arc<AddressSpace> {
        // The parent runs already.
        self.fork.forked.store(true, Ordering::Relaxed);
        self.cow.write_protected.store(false, Ordering::Relaxed);
        self.protect_if_near();
        let beacon = self
            .attached()
            .map(|attached| attached.arena.beacon)
            .or(self.fork.beacon());
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
                any_stored |= matches!(state, PageState::Swapped(_));
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
        // Its own are to be told from those it inherits.
        let removals = self.removed.count.load(Ordering::Relaxed);
        child.removed.count.store(removals, Ordering::Relaxed);
        // Both owners' copies of a page are to go out together.
        let hand = self.clock.hand.load(Ordering::Relaxed);
        child.clock.hand.store(hand, Ordering::Relaxed);
        // Of a parent that is gone by now, nothing is resident.
        let resident = present.max(self.resident_pages().max(0) as u64);
        child.set_resident_pages(resident);
        group.resources.shared.add_space(resident);
        let child = Arc::new(child);
        self.fork.family.join(self);
        self.fork.family.join(&child);
        child.protect_if_near();
        group.add_space(child.clone());
        beside.add_child(&child);
        child
    }
}
