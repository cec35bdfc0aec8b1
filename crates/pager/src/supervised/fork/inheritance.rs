//! What a forked child has yet to be compared for, and what may be served of it before. Data only.

use crate::supervised::events::reorder::Change;

/// Changes of mappings that a forked child contains or not, to be decided by its mappings. Guarded by a mutex of the
/// child's address space.
#[derive(Clone, Default)]
pub(crate) struct Inheritance {
    /// In an order in which each was possible. All were applied to the parent's page states after these were copied.
    pub history: Vec<Change>,
    /// How many of them were read before the fork.
    pub forked_at: usize,
}

/// What may be served of a child's faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identified {
    /// All.
    Yes,
    /// Its process was not found, and what it has paged out depends on its mappings: it is to fault again.
    NotYet,
    /// Its beacon alone: pages are lost, and it could not be killed.
    BeaconOnly,
}
