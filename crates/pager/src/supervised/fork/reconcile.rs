//! Reconciling the page states of a forked child with its mappings, before its first fault is served.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::reorder::Change;
use crate::supervised::fork::inheritance::Inheritance;
use crate::supervised::fork::snapshot::{ChildMappings, ParentMappings, contained, ranges};
use crate::supervised::fork::withheld::is_any_swapped;
use crate::supervised::kernel::{Inspector, Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::supervised::util::fd_pressure::patiently;
use crate::sync::lock;
use memfold_sys::process::{InheritedBy, InheritedRange};
use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the child's gate, which is free while the child waits for its first fault. Longer
/// blocks the handler for longer before it kills the child. The simulation's clock runs ahead of what its threads do.
const PATIENCE: Duration = Duration::from_secs(if cfg!(simulated) { 3600 } else { 5 });

impl AddressSpace {
    /// What is managed, in parts that are one registered mapping each; `None` if not all of it is registered. A range
    /// with `MADV_DONTFORK` is not in the child, and memory that the child maps there later is not registered.
    fn registered_parts(&self, inspector: &Inspector) -> Option<Vec<PageRange>> {
        let ranges = lock(&self.managed).ranges().to_vec();
        let mut parts = Vec::new();
        for range in ranges {
            let mut rest = range;
            while !rest.is_empty() {
                let mut part = rest;
                if !self.uffd().is_registered(part) {
                    // Neighbours may be mappings of their own.
                    let (_, end) = inspector.mapping_around(rest.start).ok()??;
                    part.end = VirtualPage::containing(end).min(rest.end);
                    if part == rest || !self.uffd().is_registered(part) {
                        return None;
                    }
                }
                parts.push(part);
                rest.start = part.end;
            }
        }
        Some(parts)
    }

    /// Whether no page state depends on the mappings of a child without concurrent changes: nothing is paged out, and
    /// all that is managed is registered.
    fn depends_on_nothing(&self, inspector: &Inspector, is_prepared: bool) -> bool {
        !self.fork.inherited_stored.load(Ordering::Relaxed)
            && (!is_prepared || self.adopts_all_that_is_managed())
            && self.registered_parts(inspector).is_some()
    }

    /// Whether pages that are present show that the child inherited each mapping of which something is paged out. To list
    /// the flags of all mappings takes the kernel a walk over all page tables.
    ///
    /// All that is managed is registered, so none of it was moved away. It may have been emptied by the fork
    /// (`MADV_WIPEONFORK`); then nothing of it is present, as the child waits for its first fault to be served. What is
    /// managed no more, and is not all back yet, shows nothing.
    fn shows_copies(&self, gate: &Exclusive<'_>, inspector: &Inspector) -> bool {
        let unmanaged = lock(&self.managed).uncovered(PageTable::everything());
        if unmanaged.into_iter().any(|part| is_any_swapped(gate, part)) {
            return false;
        }
        let is_shown = |part: PageRange| {
            !is_any_swapped(gate, part)
                || first_resident(gate, part).is_some_and(|page| {
                    let present = inspector.resident(PageRange::around(page, 1));
                    present.is_ok_and(|present| !present.ranges().is_empty())
                })
        };
        let parts = self.registered_parts(inspector);
        parts.is_some_and(|parts| parts.into_iter().all(is_shown))
    }

    /// Registers all that is managed in the child of a prepared fork. `false` if its mappings must be looked at more
    /// closely: of what has no mark, as the program keeps it from children itself, it has anything else there.
    fn adopts_all_that_is_managed(&self) -> bool {
        let managed = lock(&self.managed).ranges().to_vec();
        let marked = lock(&self.prepared.marked).clone();
        let is_marked = |range: &PageRange| marked.covered(*range) == [*range];
        managed.iter().all(is_marked) && managed.into_iter().all(|range| self.adopt(range))
    }

    /// Reconciles the page states of a child with its mappings, once, while the child waits. Its parent may be gone.
    pub(crate) fn reconcile(&self, parent: Option<&AddressSpace>) {
        let mut inheritance = lock(&self.fork.inheritance);
        let Some(inspector) = self.inspector() else {
            return;
        };
        let Some(inheritance) = inheritance.take() else {
            return;
        };
        if Bug::ForkNotCompared.is_back() {
            return;
        }
        let is_prepared = self.resources.prepares_forks();
        // Of memory that is not registered when it is copied, the kernel copies no zero pages.
        self.fork.uncompared.store(is_prepared, Ordering::Relaxed);
        if inheritance.history.is_empty() && self.depends_on_nothing(&inspector, is_prepared) {
            self.fork.uncompared.store(true, Ordering::Relaxed);
            return;
        }
        let by = if is_prepared {
            InheritedBy::Mark
        } else {
            InheritedBy::Registration
        };
        let gate = self.exclusive_within(PATIENCE);
        if !is_prepared
            && inheritance.history.is_empty()
            && gate
                .as_ref()
                .is_ok_and(|gate| self.shows_copies(gate, &inspector))
        {
            self.fork.uncompared.store(true, Ordering::Relaxed);
            return;
        }
        let (Ok(mut gate), Ok(ranges)) = (gate, patiently(|| inspector.inherited(by))) else {
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
        // What its program keeps from children itself has no mark, and is not in the child.
        let registered = if is_prepared {
            std::mem::take(&mut *lock(&self.prepared.marked))
        } else {
            self.managed_or_out(&gate)
        };
        let mut before = ParentMappings {
            registered,
            resident: RangeSet::default(),
        };
        let Some(mut mappings) = self.child_mappings(&ranges, is_prepared) else {
            self.kill_program("its memory cannot be registered after a fork");
            return;
        };
        let is_clear = apply_contained(&inheritance, self, &gate, (&mut before, &mut mappings));
        #[cfg(simulated)]
        if !inheritance.history.is_empty() {
            self.uffd().0.note_compared(is_clear);
        }
        if !is_clear {
            self.kill_program(
                "one of its parent's threads moved memory over other memory (mremap) while another forked, and the \
                 child's mappings do not show whether it has it before or after; fork while no thread calls mremap",
            );
        }
        let may_be_in_child = is_prepared.then_some(&before.registered);
        self.kill_if_unknown(&gate, &mappings, (may_be_in_child, parent));
        self.sampling.rescan.store(true, Ordering::Relaxed);
        for gone in mappings.registered.uncovered(PageTable::everything()) {
            self.apply_unmap(&gate, gone);
        }
        for range in mappings.wiped.ranges() {
            self.apply_wipe(&gate, *range);
        }
        gate.table_mut().prune(PageTable::everything());
    }

    /// What is managed, and pages that are out where nothing is managed any more: that is registered still.
    fn managed_or_out(&self, gate: &Exclusive<'_>) -> RangeSet {
        let mut ranges = lock(&self.managed).clone();
        for unmanaged in ranges.uncovered(PageTable::everything()) {
            gate.table().visit(unmanaged, |page, entry| {
                if matches!(entry.load(), PageState::Swapped(..)) {
                    ranges.add(PageRange::around(page, 1));
                }
                true
            });
        }
        ranges
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
    fn kill_if_unknown(
        &self,
        gate: &Exclusive<'_>,
        mappings: &ChildMappings,
        (marked, parent): (Option<&RangeSet>, Option<&AddressSpace>),
    ) {
        let missing = self.may_have_moved(gate, mappings, marked);
        // What memfold withholds shows as if the program kept it.
        let keeps =
            |parent: &AddressSpace| marked.is_none() && parent.keeps_from_children(&missing);
        let is_unknown = !missing.is_empty() && !parent.is_some_and(keeps);
        if is_unknown && !Bug::UnreadMovesIgnored.is_back() {
            self.kill_program(
                "its parent was killed while one of its threads moved memory and another forked, so memfold \
                 does not know where the child has its paged-out pages",
            );
        }
        if !self.resources.prepares_forks() {
            return;
        }
        match self.has_lost_marks(gate, &mappings.registered) {
            Some(false) => {}
            Some(true) => {
                self.kill_program(
                    "its parent took back advice of memfold's on its memory (madvise), so memfold does not know which of \
                     it is paged out",
                );
            }
            None => {
                self.kill_program(
                    "it has more mappings, or longer paths of mapped files, than memfold reads, so memfold does not know \
                     which of its memory is paged out",
                );
            }
        }
    }
}

impl AddressSpace {
    /// What the child may have elsewhere by a move whose event was never raised: a thread that is killed before its
    /// event is read takes it along. Then pages that are paged out are not mapped. Where they are cannot be told: the
    /// mapping may have grown in the move, have other rights by now, or be in place of another. Where the fork was prepared, only
    /// what was `marked` can be in the child.
    fn may_have_moved(
        &self,
        gate: &Exclusive<'_>,
        mappings: &ChildMappings,
        marked: Option<&RangeSet>,
    ) -> Vec<PageRange> {
        let managed = self.managed_or_out(gate);
        let unmapped = marked.unwrap_or(&managed).ranges().iter();
        let unmapped = unmapped.flat_map(|range| mappings.registered.uncovered(*range));
        unmapped
            .filter(|range| is_any_swapped(gate, *range))
            .collect()
    }

    /// Whether a program that lives keeps all of these ranges from its children (`MADV_DONTFORK`).
    fn keeps_from_children(&self, ranges: &[PageRange]) -> bool {
        let Some(Ok(areas)) = self.inspector().map(|one| one.kept_from_children()) else {
            return false;
        };
        let areas = areas.iter().filter(|area| area.is_registered);
        let areas = areas.map(|area| PageRange::of_addresses(area.start, area.end));
        let kept: RangeSet = areas.collect();
        ranges.iter().all(|range| kept.covered(*range) == [*range])
    }

    /// Whether pages are paged out where the child of a prepared fork has memory without a mark; `None` if that cannot be
    /// told.
    fn has_lost_marks(&self, gate: &Exclusive<'_>, marked: &RangeSet) -> Option<bool> {
        let areas = match self.inspector().map(|inspector| inspector.vmas()) {
            Some(Ok(areas)) => areas,
            Some(Err(error)) if error.kind() == ErrorKind::FileTooLarge => return None,
            // It is gone.
            Some(Err(_)) | None => return Some(false),
        };
        let areas = areas.iter().filter(|area| area.is_anonymous());
        let areas = areas.map(|area| PageRange::of_addresses(area.start, area.end));
        let mut known = marked.clone();
        if let Some(attached) = self.attached() {
            // Mapped since, maybe where the program keeps memory from its children.
            known.add(attached.arena.whole);
        }
        let mut unmarked = areas.flat_map(|range| known.uncovered(range));
        Some(unmarked.any(|range| is_any_swapped(gate, range)))
    }
}

/// Applies the changes that a child contains. `false` if its mappings do not tell which these are.
fn apply_contained(
    inheritance: &Inheritance,
    child: &AddressSpace,
    gate: &Exclusive<'_>,
    (parent, mappings): (&mut ParentMappings, &mut ChildMappings),
) -> bool {
    let Inheritance { history, forked_at } = inheritance;
    if Bug::ChildrenRefused.is_back() && !history.is_empty() {
        return false;
    }
    for range in history.iter().flat_map(|change| ranges(*change)) {
        parent.resident.add_all(&known_resident(gate, range));
        // An exiting process has no resident pages.
        let resident = child.present(range).unwrap_or_default();
        let registered = mappings.registered.covered(range).into_iter();
        let parts = registered.flat_map(|registered| resident.covered(registered));
        parts.for_each(|part| mappings.resident.add(part));
    }
    let is_any_out = |ranges: &RangeSet| {
        let mut ranges = ranges.ranges().iter();
        ranges.any(|range| is_any_swapped(gate, *range))
    };
    let Some(contained) = contained(history, *forked_at, parent, mappings, is_any_out) else {
        return false;
    };
    for (change, _) in history.iter().zip(&contained).filter(|(_, is)| **is) {
        match *change {
            Change::Unmap(range) => child.apply_unmap(gate, range),
            Change::Remap { from, to, stays } => child.apply_remap(gate, from, to, stays),
            Change::Remove(range) => child.apply_remove(gate, range),
            Change::Fork(_) => {}
        }
    }
    true
}

/// The first page of a range that is resident according to the page states.
fn first_resident(gate: &Exclusive<'_>, range: PageRange) -> Option<VirtualPage> {
    let mut first = None;
    gate.table().visit(range, |page, entry| {
        if matches!(entry.load(), PageState::Resident { .. }) {
            first = Some(page);
        }
        first.is_none()
    });
    first
}

/// The pages of a range that are resident according to the page states.
fn known_resident(gate: &Exclusive<'_>, range: PageRange) -> RangeSet {
    let mut resident = RangeSet::default();
    gate.table().visit(range, |page, entry| {
        if matches!(entry.load(), PageState::Resident { .. }) {
            resident.add(PageRange::around(page, 1));
        }
        true
    });
    resident
}
