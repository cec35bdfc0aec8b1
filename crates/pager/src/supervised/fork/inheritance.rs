//! What a forked child has yet to compare with its own mappings: data alone.

use crate::page::VirtualPage;
use crate::page_state::PageState;
use crate::supervised::fork::snapshot::Noted;
use memfold_swap::Slot;

/// A change that was applied before a fork, with the page states that it discarded.
pub struct AppliedBefore {
    pub noted: Noted,
    /// Each slot among them has one count that belongs to this list.
    pub states: Vec<(VirtualPage, PageState)>,
}

impl AppliedBefore {
    /// The slots among the page states.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        self.states.iter().filter_map(|(_, state)| match state {
            PageState::Swapped(slot) => Some(*slot),
            _ => None,
        })
    }
}

/// Changes that the child's mappings may contain or not: its own mappings decide.
#[derive(Default)]
pub struct Inheritance {
    /// Applied before the fork.
    pub before: Vec<AppliedBefore>,
    /// Applied after it.
    pub after: Vec<Noted>,
}

impl Inheritance {
    /// The slots to release where the child ended before it was compared.
    pub fn into_slots(self) -> Vec<Slot> {
        self.before.iter().flat_map(AppliedBefore::slots).collect()
    }
}
