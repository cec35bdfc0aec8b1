//! Comparing what a forked child inherited with its own mappings, before its first fault is served.

use crate::page::{PageRange, bytes};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::fork::snapshot::{Mapped, Noted, Own, seen};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_swap::Slot;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the comparison waits for the child's gate, which no other thread uses while the child
/// waits for its first fault.
const PATIENCE: Duration = Duration::from_secs(5);

impl AddressSpace {
    /// Whether all that counts as managed is registered: a child lacks what was kept from it
    /// (`MADV_DONTFORK`), and what it maps there itself later is not registered. Also `false` where
    /// a managed range is more than one mapping.
    fn has_all_that_is_managed(&self) -> bool {
        let ranges = lock(&self.managed).ranges().to_vec();
        ranges.iter().all(|range| {
            self.uffd()
                .is_registered(range.start.address(), bytes(range.pages()))
        })
    }

    /// Compares what a child inherited with its own mappings; once, while it stands still.
    pub fn reconcile(&self) {
        let mut place = lock(&self.fork.inheritance);
        let Some(inspector) = self.inspector() else {
            return;
        };
        let Some(inheritance) = place.take() else {
            return;
        };
        let certain = inheritance.before.is_empty() && inheritance.after.is_empty();
        if certain
            && !self.fork.inherited_stored.load(Ordering::Relaxed)
            && self.has_all_that_is_managed()
        {
            self.fork.uncompared.store(true, Ordering::Relaxed);
            return;
        }
        let (Ok(mut gate), Ok(ranges)) = (
            self.exclusive_within(PATIENCE),
            patiently(|| inspector.inherited_ranges()),
        ) else {
            let slots = inheritance.into_slots();
            self.resources.swap.release_bulk(&slots);
            // Of a process that is gone; of another's, whatever the reason, nothing can be known.
            if !self.is_gone() {
                self.kill_program("the mappings of a forked child cannot be read");
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
        apply_seen(inheritance, self, &gate, own);
        for gone in registered.uncovered(PageTable::everything()) {
            self.apply_unmap(&gate, gone);
        }
        for range in wiped.ranges() {
            self.apply_wipe(&gate, *range);
        }
        gate.table_mut().prune(PageTable::everything());
    }
}

/// Changes the page states of a child to those that belong to its own mappings.
fn apply_seen(inheritance: Inheritance, child: &AddressSpace, gate: &Exclusive<'_>, mut own: Own) {
    let before = inheritance.before.iter().map(|beside| &beside.noted);
    let history: Vec<Noted> = before.chain(&inheritance.after).cloned().collect();
    let forked_at = inheritance.before.len();
    let mut at_fork = Mapped {
        registered: lock(&child.managed).clone(),
        present: RangeSet::default(),
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
    for (beside, seen) in inheritance.before.into_iter().zip(&seen).rev() {
        if *seen {
            let slots: Vec<Slot> = beside.slots().collect();
            child.resources.swap.release_bulk(&slots);
            continue;
        }
        match beside.noted.change {
            Change::Unmap(range) => {
                child.apply_unmap(gate, range);
                lock(&child.managed).add(range);
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
    let after = inheritance.after.iter().zip(&seen[forked_at..]);
    for (noted, _) in after.filter(|(_, seen)| **seen) {
        match noted.change {
            Change::Unmap(range) => child.apply_unmap(gate, range),
            Change::Remap { from, to, stays } => child.apply_remap(gate, from, to, stays),
            Change::Remove(_) | Change::Fork(_) => {}
        }
    }
}

/// What of a range is in memory, as far as is known.
pub fn known_resident(gate: &Exclusive<'_>, range: PageRange) -> RangeSet {
    let mut resident = RangeSet::default();
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
