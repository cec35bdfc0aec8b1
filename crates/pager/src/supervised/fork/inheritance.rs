//! Changes beside the fork of a child that it has yet to be compared for. Data only.

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
