//! Reconciling the page states of a forked child with its mappings, before its first fault is served.

use crate::bugs::Bug;
use crate::page::PageRange;
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::fork::snapshot::{ChildMappings, Mapped, RecordedChange, contained};
use crate::supervised::fork::withheld::is_any_swapped;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_swap::Slot;
use memfold_sys::process::{InheritedBy, InheritedRange};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the child's gate, which is free while the child waits for its first fault. Longer
/// blocks the handler for longer before it kills the child.
const PATIENCE: Duration = Duration::from_secs(5);

impl AddressSpace {
    /// Whether every managed range is one registered mapping. A range with `MADV_DONTFORK` is not in
    /// the child, and memory that the child maps there later is not registered.
    fn has_all_that_is_managed(&self) -> bool {
        let ranges = lock(&self.managed).ranges().to_vec();
        ranges.iter().all(|range| self.uffd().is_registered(*range))
    }

    /// Reconciles the page states of a child with its mappings, once, while the child waits.
    pub(crate) fn reconcile(&self) {
        let mut inheritance = lock(&self.fork.inheritance);
        let Some(inspector) = self.inspector() else {
            return;
        };
        let Some(inheritance) = inheritance.take() else {
            return;
        };
        if Bug::ForkNotCompared.is_back() {
            self.release_inherited(inheritance);
            return;
        }
        let is_prepared = self.resources.prepares_forks();
        // Of memory that is not registered when it is copied, the kernel copies no zero pages.
        self.fork.uncompared.store(is_prepared, Ordering::Relaxed);
        let certain = inheritance.before.is_empty() && inheritance.after.is_empty();
        let needs_no_look = certain && !self.fork.inherited_stored.load(Ordering::Relaxed);
        if needs_no_look && is_prepared {
            let managed = lock(&self.managed).ranges().to_vec();
            // Where one fails, its mappings are looked at more closely below.
            let _ = managed.into_iter().all(|range| self.adopt(range));
        }
        if needs_no_look && self.has_all_that_is_managed() {
            self.fork.uncompared.store(true, Ordering::Relaxed);
            return;
        }
        let by = if is_prepared {
            InheritedBy::Mark
        } else {
            InheritedBy::Registration
        };
        let (Ok(mut gate), Ok(ranges)) = (
            self.exclusive_within(PATIENCE),
            patiently(|| inspector.inherited(by)),
        ) else {
            self.release_inherited(inheritance);
            // The mappings of an exiting child cannot be read; a child that lives must not run without
            // them.
            if !self.is_gone() {
                self.kill_program("its mappings cannot be read after a fork");
            }
            return;
        };
        if self.attached().is_none() {
            // A helper that comes later is inspected through files of its own.
            inspector.close_flags();
        }
        let marked = std::mem::take(&mut *lock(&self.prepared.marked));
        let Some(mappings) = self.child_mappings(&ranges, is_prepared) else {
            self.kill_program("its memory cannot be registered after a fork");
            self.release_inherited(inheritance);
            return;
        };
        let (registered, wiped) = (mappings.registered.clone(), mappings.wiped.clone());
        let usable = mappings.usable.clone();
        apply_contained(inheritance, self, &gate, (mappings, marked));
        self.kill_if_unknown(&gate, &registered, &usable);
        for gone in registered.uncovered(PageTable::everything()) {
            self.apply_unmap(&gate, gone);
        }
        for range in wiped.ranges() {
            self.apply_wipe(&gate, *range);
        }
        gate.table_mut().prune(PageTable::everything());
    }

    /// Releases what the child inherited.
    fn release_inherited(&self, inheritance: Inheritance) {
        let slots = inheritance.into_slots();
        self.resources.swap.release_bulk(&slots);
    }

    /// The child's mappings, which are registered if its fork was prepared. `None` if that fails.
    fn child_mappings(&self, areas: &[InheritedRange], is_prepared: bool) -> Option<ChildMappings> {
        let mut mappings = ChildMappings::default();
        for area in areas {
            let range = PageRange::of_addresses(area.start, area.end);
            if is_prepared && !self.adopt(range) {
                return None;
            }
            mappings.registered.add(range);
            if area.movable {
                mappings.usable.add(range);
            }
            if area.wiped {
                mappings.wiped.add(range);
            }
        }
        Some(mappings)
    }

    /// Kills the child if it may have paged-out pages elsewhere than its page states say.
    fn kill_if_unknown(&self, gate: &Exclusive<'_>, registered: &RangeSet, usable: &RangeSet) {
        if !Bug::UnreadMovesIgnored.is_back() && self.may_have_moved(gate, registered, usable) {
            self.kill_program(
                "its parent was killed while one of its threads moved memory and another forked, so memfold \
                 does not know where the child has its paged-out pages",
            );
        }
        if self.resources.prepares_forks() && self.has_lost_marks(gate, registered) {
            self.kill_program(
                "its parent took back advice of memfold's on its memory (madvise), so memfold does not know which of it \
                 is paged out",
            );
        }
    }
}

impl AddressSpace {
    /// Whether the child may contain a move whose event was never raised: a thread that is killed before its
    /// event is read takes it along. Then registered memory is not managed, and in a range at least as long
    /// pages that are paged out are not mapped.
    fn may_have_moved(
        &self,
        gate: &Exclusive<'_>,
        registered: &RangeSet,
        usable: &RangeSet,
    ) -> bool {
        let managed = lock(&self.managed).clone();
        let unknown = usable.ranges().iter();
        let unknown = unknown.flat_map(|range| managed.uncovered(*range));
        let Some(shortest) = unknown.map(PageRange::pages).min() else {
            return false;
        };
        let unmapped = managed.ranges().iter();
        let mut unmapped = unmapped.flat_map(|range| registered.uncovered(*range));
        unmapped.any(|range| is_any_swapped(gate, range) && range.pages() >= shortest)
    }

    /// Whether pages are paged out where the child of a prepared fork has memory without a mark.
    fn has_lost_marks(&self, gate: &Exclusive<'_>, marked: &RangeSet) -> bool {
        let Some(Ok(areas)) = self.inspector().map(|inspector| inspector.vmas()) else {
            return false;
        };
        let areas = areas.iter().filter(|area| area.anonymous);
        let areas = areas.map(|area| PageRange::of_addresses(area.start, area.end));
        let mut unmarked = areas.flat_map(|range| marked.uncovered(range));
        unmarked.any(|range| is_any_swapped(gate, range))
    }
}

/// Undoes changes that a child, of whose parent `marked` was marked, does not contain, and applies changes that it contains.
fn apply_contained(
    inheritance: Inheritance,
    child: &AddressSpace,
    gate: &Exclusive<'_>,
    (mut mappings, marked): (ChildMappings, RangeSet),
) {
    let before = inheritance.before.iter().map(|applied| &applied.recorded);
    let history: Vec<RecordedChange> = before.chain(&inheritance.after).cloned().collect();
    let forked_at = inheritance.before.len();
    let mut at_fork = Mapped {
        registered: lock(&child.managed).clone(),
        present: RangeSet::default(),
    };
    at_fork.registered.add_all(&marked);
    for range in history.iter().flat_map(RecordedChange::ranges) {
        at_fork.present.add_all(&known_resident(gate, range));
        // An exiting process has no resident pages.
        let present = child.present(range).unwrap_or_default();
        for registered in mappings.registered.covered(range) {
            let parts = present.covered(registered);
            parts
                .into_iter()
                .for_each(|part| mappings.present.add(part));
        }
    }
    let contained = contained(&history, forked_at, &at_fork, &mappings);
    for (applied, contained) in inheritance.before.into_iter().zip(&contained).rev() {
        if *contained {
            let slots: Vec<Slot> = applied.slots().collect();
            child.resources.swap.release_bulk(&slots);
            continue;
        }
        match applied.recorded.change {
            Change::Unmap(range) => {
                child.apply_unmap(gate, range);
                if applied.is_managed {
                    lock(&child.managed).add(range);
                }
                for (page, state) in applied.states {
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
    let after = inheritance.after.iter().zip(&contained[forked_at..]);
    for (recorded, _) in after.filter(|(_, contained)| **contained) {
        match recorded.change {
            Change::Unmap(range) => child.apply_unmap(gate, range),
            Change::Remap { from, to, stays } => child.apply_remap(gate, from, to, stays),
            Change::Remove(_) | Change::Fork(_) => {}
        }
    }
}

/// The pages of a range that are resident according to the page states.
pub(crate) fn known_resident(gate: &Exclusive<'_>, range: PageRange) -> RangeSet {
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
