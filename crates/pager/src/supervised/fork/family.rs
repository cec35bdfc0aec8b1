//! Families: address spaces with a common ancestor by fork.

use crate::sync::{Mutex, lock};
use memfold_sys::process::Process;
use std::sync::{Arc, OnceLock, Weak};

/// A member of a family.
pub(crate) trait Member {
    /// The ID of the address space.
    fn id(&self) -> u64;
    /// Whether the program exited or executed another one.
    fn has_left(&self) -> bool;
    /// Whether the kernel has released the address space.
    fn is_dead(&self) -> bool;
}

/// Address spaces that descend from one by fork, and so may share pages. The members share it; it has
/// its own lock.
pub(crate) struct Family<M> {
    members: Mutex<Vec<Weak<M>>>,
    /// Known from its first fork on.
    pub origin: OnceLock<Origin>,
}

/// The program that a family descends from. It may have ended, or was let go.
pub(crate) struct Origin {
    pub process: Arc<Process>,
    /// Whether it descends from this process; else it was attached, and so may its children be anybody's by now.
    pub is_below: bool,
}

impl<M> Default for Family<M> {
    fn default() -> Self {
        Family {
            members: Mutex::default(),
            origin: OnceLock::new(),
        }
    }
}

impl<M: Member> Family<M> {
    /// Adds an address space, once.
    pub(crate) fn join(&self, space: &Arc<M>) {
        let mut members = lock(&self.members);
        members.retain(|member| member.strong_count() > 0);
        if !members
            .iter()
            .any(|member| member.as_ptr() == Arc::as_ptr(space))
        {
            members.push(Arc::downgrade(space));
        }
    }

    /// Whether another member's program runs.
    pub(crate) fn has_others(&self, than: &M) -> bool {
        let members = lock(&self.members);
        let mut living = members.iter().filter_map(Weak::upgrade);
        living.any(|member| member.id() != than.id() && !member.has_left())
    }

    /// Number of members whose programs run.
    pub(crate) fn living(&self) -> u64 {
        let members = lock(&self.members);
        let living = members.iter().filter_map(Weak::upgrade);
        living.filter(|member| !member.has_left()).count() as u64
    }

    /// The other members that are not dead, the youngest first: mostly the closest relatives.
    pub(crate) fn others(&self, than: &M) -> Vec<Arc<M>> {
        let members = lock(&self.members);
        let living = members.iter().rev().filter_map(Weak::upgrade);
        living
            .filter(|member| member.id() != than.id() && !member.is_dead())
            .collect()
    }
}
