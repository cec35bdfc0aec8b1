//! Forks: what a child inherits.
//!
//! The event of a fork is read after the mappings were copied, and other threads' changes of the
//! mappings may be reported on either side of it. So a child inherits the page states as of the
//! event, with a note of every change that was applied in the same breath, before or after; and
//! before its first fault is served, its own mappings say which of these it saw. Until then it
//! stands still, as it has one thread, and that one waits.

use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::{PageState, StageIndex};
use crate::page_table::PageTable;
use crate::range_set::Regions;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::snapshot::{Mapped, Noted, Own, seen};
use crate::supervised::reclaim::batch::Mover;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SHARED: PageState = PageState::Resident {
    passes: 0,
    shared: true,
};
/// Nobody else is in the gate of a child that stands still.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was in the stage, copied out before the event of a fork was read: from then on the parent
/// runs, and may be gone before its memory can be read.
pub type Stash = HashMap<StageIndex, Page>;

/// A change that was applied before a fork, with the page states that it made an end of.
struct Beside {
    noted: Noted,
    /// Slots are counted once for this list.
    states: Vec<(VirtualPage, PageState)>,
}

/// The changes that were applied beside the forks of one reading.
#[derive(Default)]
pub struct BesideForks {
    before: Vec<Beside>,
    /// The children so far, each with how many of `after` came before it.
    children: Vec<(Arc<AddressSpace>, usize)>,
    after: Vec<Noted>,
    /// Something that a child may have is lost.
    lost: bool,
}

/// What a child has yet to compare with its own mappings.
#[derive(Default)]
pub struct Inheritance {
    before: Vec<Beside>,
    after: Vec<Noted>,
}

impl BesideForks {
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
                let parts = lock(&space.regions).covered(range);
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
                Change::Remove(_) | Change::Fork(_) => Regions::default(),
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
        self.before.push(Beside { noted, states });
    }

    /// Notes a child as it is made.
    pub fn born(&mut self, child: &Arc<AddressSpace>) {
        let copies = self.before.iter().map(|beside| Beside {
            noted: beside.noted.clone(),
            states: beside.copied(child),
        });
        if let Some(inheritance) = &mut *lock(&child.inheritance) {
            inheritance.before = copies.collect();
        }
        child.lost.fetch_or(self.lost, Ordering::Relaxed);
        self.children.push((child.clone(), self.after.len()));
    }

    /// All is applied: the children learn what came after them.
    pub fn finish(self, space: &AddressSpace) {
        for (child, from) in self.children {
            if let Some(inheritance) = &mut *lock(&child.inheritance) {
                inheritance.after = self.after[from..].to_vec();
            }
        }
        let slots: Vec<Slot> = self.before.iter().flat_map(Beside::slots).collect();
        space.group().swap.release_bulk(&slots);
    }
}

impl Beside {
    fn slots(&self) -> impl Iterator<Item = Slot> {
        self.states.iter().filter_map(|(_, state)| match state {
            PageState::Swapped(slot) => Some(*slot),
            _ => None,
        })
    }

    fn copied(&self, space: &AddressSpace) -> Vec<(VirtualPage, PageState)> {
        for slot in self.slots() {
            space.must_duplicate(slot);
        }
        self.states.clone()
    }
}

/// The state in which another owner has a page, with a count of its own; `None` where there is
/// nothing to have.
fn inherited(space: &AddressSpace, state: PageState) -> Option<PageState> {
    match state {
        PageState::Hole => None,
        // As old as the parent's, so that both go out together.
        PageState::Resident { passes, .. } => Some(PageState::Resident {
            passes,
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

impl Inheritance {
    /// Changes the page states of a child to those that belong to its own mappings.
    fn settle(self, child: &AddressSpace, gate: &Exclusive<'_>, mut own: Own) {
        let before = self.before.iter().map(|beside| &beside.noted);
        let history: Vec<Noted> = before.chain(&self.after).cloned().collect();
        let forked_at = self.before.len();
        let mut at_fork = Mapped {
            registered: lock(&child.regions).clone(),
            present: Regions::default(),
        };
        for range in history.iter().flat_map(Noted::ranges) {
            at_fork.present.add_all(&known_resident(gate, range));
            // Of a process that is gone nothing is.
            let present = child.present(range).unwrap_or_default();
            for registered in own.registered.covered(range) {
                let parts = present.covered(registered);
                parts.into_iter().for_each(|part| own.present.add(part));
            }
        }
        let seen = seen(&history, forked_at, &at_fork, &own);
        for (beside, seen) in self.before.into_iter().zip(&seen).rev() {
            if *seen {
                let slots: Vec<Slot> = beside.slots().collect();
                child.group().swap.release_bulk(&slots);
                continue;
            }
            match beside.noted.change {
                Change::Unmap(range) => {
                    child.apply_unmap(gate, range);
                    lock(&child.regions).add(range);
                    for (page, state) in beside.states {
                        gate.table().entry(page).set(state);
                    }
                }
                Change::Remap { from, to, .. } => {
                    let target = from.moved(from.start, to);
                    child.apply_remap(gate, target, from.start, false);
                }
                Change::Remove(_) | Change::Fork(_) => {}
            }
        }
        let after = self.after.iter().zip(&seen[forked_at..]);
        for (noted, _) in after.filter(|(_, seen)| **seen) {
            match noted.change {
                Change::Unmap(range) => child.apply_unmap(gate, range),
                Change::Remap { from, to, stays } => child.apply_remap(gate, from, to, stays),
                Change::Remove(_) | Change::Fork(_) => {}
            }
        }
    }

    /// Gives back what a child held that never came to look.
    pub fn into_slots(self) -> Vec<Slot> {
        self.before.iter().flat_map(Beside::slots).collect()
    }
}

/// What of a range is in memory, as far as is known.
fn known_resident(gate: &Exclusive<'_>, range: PageRange) -> Regions {
    let mut resident = Regions::default();
    gate.table().visit(range, |page, entry| {
        if matches!(
            entry.load(),
            PageState::Resident { .. } | PageState::Moving(_)
        ) {
            resident.add(PageRange::around(page, 1));
        }
        true
    });
    resident
}

impl AddressSpace {
    /// The child sees every page as it was at the fork. No page was copied in or moved out since
    /// (the kernel refused, or the gate was held), so the states here are the child's. If staged
    /// pages are lost, as the parent is gone already, the child is stopped at its first fault.
    pub fn apply_fork(
        self: &Arc<Self>,
        gate: &Exclusive<'_>,
        uffd: OwnedFd,
        mover: Mover,
        beside: &mut BesideForks,
    ) -> Arc<AddressSpace> {
        let group = self.group();
        // The parent runs already.
        self.forked.store(true, Ordering::Relaxed);
        self.write_protected.store(false, Ordering::Relaxed);
        self.protect_if_near();
        let beacon = self
            .attached()
            .map(|attached| attached.arena.beacon)
            .or(self.beacon());
        let mut child = AddressSpace::new(group.clone(), group.next_id(), uffd, mover)
            .of_child(self.family.clone(), beacon);
        let lost = self.settle_staged(gate);
        child.lost.store(lost, Ordering::Relaxed);
        let (mut any_stored, mut present) = (false, 0);
        let inherits = child.table.get_mut();
        gate.table().visit(PageTable::everything(), |page, entry| {
            let state = entry.load();
            if let PageState::Resident { passes, .. } = state {
                entry.set(PageState::Resident {
                    passes,
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
        *lock(&child.regions) = lock(&self.regions).clone();
        *lock(&child.thread_ends) = lock(&self.thread_ends).clone();
        *lock(&child.inheritance) = Some(Inheritance::default());
        child.inherited_stored.store(any_stored, Ordering::Relaxed);
        // Its own are to be told from those it inherits.
        let removals = self.removals.load(Ordering::Relaxed);
        child.removals.store(removals, Ordering::Relaxed);
        // Both owners' copies of a page are to go out together.
        let hand = self.hand.load(Ordering::Relaxed);
        child.hand.store(hand, Ordering::Relaxed);
        // Of a parent that is gone by now, nothing is resident.
        let resident = present.max(self.resident_pages().max(0) as u64);
        child.set_resident_pages(resident);
        group.shared.came(resident);
        let child = Arc::new(child);
        self.family.join(self);
        self.family.join(&child);
        child.protect_if_near();
        group.add_space(child.clone());
        beside.born(&child);
        child
    }

    /// Before events are read among which a fork may be: copies the stage. The gate is held
    /// exclusively, so nothing is staged or returned until they are applied.
    pub fn stash(&self, gate: &Exclusive<'_>) -> Stash {
        let Some(attached) = self.attached() else {
            return Stash::new();
        };
        // What the helper moved already is staged.
        self.settle(gate);
        let staged = self.staged_pages(gate);
        let places: Vec<StageIndex> = staged.iter().map(|(_, place)| *place).collect();
        let addresses: Vec<u64> = places
            .iter()
            .map(|place| self.stage_address(*place))
            .collect();
        let mut buffer = vec![[0u8; PAGE_SIZE]; places.len()];
        // What cannot be read is missed, and said, where it is needed.
        let read = attached
            .inspector
            .read_pages(&addresses, buffer.as_flattened_mut())
            .unwrap_or(0);
        places
            .into_iter()
            .zip(buffer.into_iter().take(read))
            .collect()
    }

    fn staged_pages(&self, gate: &Exclusive<'_>) -> Vec<(VirtualPage, StageIndex)> {
        let mut staged = Vec::new();
        if lock(&self.stage).live() == 0 {
            return staged;
        }
        gate.table().visit(PageTable::everything(), |page, entry| {
            if let PageState::Staged(place) | PageState::Returning(place) = entry.load() {
                staged.push((page, place));
            }
            true
        });
        staged
    }

    /// Puts every staged page into the swap space, so that it can have two owners. What the stash
    /// lacks is read now.
    pub fn store_staged(&self, gate: &Exclusive<'_>, stash: Option<Stash>) {
        let mut contents = stash.unwrap_or_default();
        let staged = self.staged_pages(gate);
        if staged
            .iter()
            .any(|(_, place)| !contents.contains_key(place))
        {
            contents.extend(self.stash(gate));
        }
        let mut scratch = Scratch::new();
        for (page, place) in staged {
            if let Some(contents) = contents.get(&place) {
                self.store_one_staged(gate, page, place, contents, &mut scratch);
            }
        }
    }

    /// Whether pages are still staged though a fork is applied: those of a parent that is gone.
    fn settle_staged(&self, gate: &Exclusive<'_>) -> bool {
        !self.staged_pages(gate).is_empty()
    }

    fn store_one_staged(
        &self,
        gate: &Exclusive<'_>,
        page: VirtualPage,
        place: StageIndex,
        contents: &Page,
        scratch: &mut Scratch,
    ) {
        let group = self.group();
        let slot = match self.store(contents, scratch) {
            Ok(slot) => slot,
            Err(error) => {
                // It stays in the stage: the parent has it, the child counts as having lost it.
                log::error!("a forking program's page cannot be stored: {error}");
                return;
            }
        };
        group.counters.pages_out.fetch_add(1, Ordering::Relaxed);
        gate.table().entry(page).set(PageState::Swapped(slot));
        lock(&self.stage).retire(place);
    }

    /// Whether all that counts as managed is registered: a child lacks what was kept from it
    /// (`MADV_DONTFORK`), and what it maps there itself later is not registered. Also `false` where
    /// a managed range is more than one mapping.
    fn has_all_that_is_managed(&self) -> bool {
        let ranges = lock(&self.regions).ranges().to_vec();
        ranges.iter().all(|range| {
            self.uffd()
                .is_registered(range.start.address(), bytes(range.pages()))
        })
    }

    /// Compares what a child inherited with its own mappings; once, while it stands still.
    pub fn reconcile(&self) {
        let mut place = lock(&self.inheritance);
        let Some(inspector) = self.inspector() else {
            return;
        };
        let Some(inheritance) = place.take() else {
            return;
        };
        let certain = inheritance.before.is_empty() && inheritance.after.is_empty();
        if certain
            && !self.inherited_stored.load(Ordering::Relaxed)
            && self.has_all_that_is_managed()
        {
            self.uncompared.store(true, Ordering::Relaxed);
            return;
        }
        let (Ok(mut gate), Ok(ranges)) = (
            self.exclusive_within(PATIENCE),
            patiently(|| inspector.inherited_ranges()),
        ) else {
            let slots = inheritance.into_slots();
            self.group().swap.release_bulk(&slots);
            // Of a process that is gone; of another's, whatever the reason, nothing can be known.
            if !self.is_gone() {
                self.stop_program("the mappings of a forked child cannot be read");
            }
            return;
        };
        let mut own = Own::default();
        for area in &ranges {
            let range = PageRange::of_addresses(area.start, area.end);
            own.registered.add(range);
            if area.movable {
                own.usable.add(range);
            }
            if area.wiped {
                own.wiped.add(range);
            }
        }
        let (registered, wiped) = (own.registered.clone(), own.wiped.clone());
        inheritance.settle(self, &gate, own);
        for gone in registered.uncovered(PageTable::everything()) {
            self.apply_unmap(&gate, gone);
        }
        for range in wiped.ranges() {
            self.apply_wipe(&gate, *range);
        }
        gate.table_mut().prune(PageTable::everything());
    }
}
