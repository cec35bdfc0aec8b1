//! Virtual swap slots.

use std::fmt;

/// How many slots a cluster has.
pub const CLUSTER_SLOTS: usize = 512;

/// A virtual swap slot: the name of a page that was swapped out.
///
/// It says nothing about where the data lies. Slot 0 is never handed out, so a user may pack "no
/// slot" as 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Slot(u32);

impl Slot {
    /// The slot with the number that [`Slot::raw`] gave.
    ///
    /// Any number may be given; the swap space stops the program when it is asked to work on a
    /// slot that is not in use.
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// The slot's number.
    pub const fn raw(self) -> u32 {
        self.0
    }

    pub(crate) const fn cluster(self) -> ClusterId {
        ClusterId(self.0 / CLUSTER_SLOTS as u32)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize % CLUSTER_SLOTS
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}:{})", self.cluster().0, self.index())
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The number of a cluster. Cluster 0 is never used, so that slot 0 is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClusterId(pub(crate) u32);

impl ClusterId {
    pub(crate) const fn slot(self, index: usize) -> Slot {
        debug_assert!(index < CLUSTER_SLOTS);
        Slot(self.0 * CLUSTER_SLOTS as u32 + index as u32)
    }

    pub(crate) const fn number(self) -> usize {
        self.0 as usize
    }
}
