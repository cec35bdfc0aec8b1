//! Changes that a forked child has yet to be reconciled with. Data only.

use crate::page::VirtualPage;
use crate::page_state::PageState;
use crate::supervised::fork::snapshot::RecordedChange;
use memfold_swap::Slot;

/// A change applied before a fork, with the page states that it discarded.
pub(crate) struct AppliedBefore {
    /// The change.
    pub recorded: RecordedChange,
    /// The discarded page states. The list owns one reference of each slot.
    pub states: Vec<(VirtualPage, PageState)>,
    /// What was unmapped was managed.
    pub is_managed: bool,
}

impl AppliedBefore {
    /// The slots in the page states.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.states.iter().filter_map(|(_, state)| match state {
            PageState::Swapped(slot, _) => Some(*slot),
            _ => None,
        })
    }
}

/// Changes that the child may contain or not, to be decided by its mappings. Guarded by a mutex of the
/// child's address space.
#[derive(Default)]
pub(crate) struct Inheritance {
    /// Changes applied before the fork.
    pub before: Vec<AppliedBefore>,
    /// Changes applied after the fork.
    pub after: Vec<RecordedChange>,
}

impl Inheritance {
    /// The slots to release if the child exits before it is reconciled.
    pub(crate) fn into_slots(self) -> Vec<Slot> {
        self.before.iter().flat_map(AppliedBefore::slots).collect()
    }
}
