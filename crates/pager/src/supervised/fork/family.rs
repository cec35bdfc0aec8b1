//! Address spaces that came from one by forks.

use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};

/// What a family asks of its members.
pub trait Member {
    /// Its ID.
    fn id(&self) -> u64;
    /// Whether its process exited or executed another program.
    fn has_left(&self) -> bool;
    /// Whether the kernel has released the address space.
    fn is_dead(&self) -> bool;
}

/// Address spaces that came from one by forks.
pub struct Family<M> {
    members: Mutex<Vec<Weak<M>>>,
}

impl<M> Default for Family<M> {
    fn default() -> Self {
        Family {
            members: Mutex::default(),
        }
    }
}

impl<M: Member> Family<M> {
    /// Adds an address space.
    pub fn join(&self, space: &Arc<M>) {
        let mut members = lock(&self.members);
        members.retain(|member| member.strong_count() > 0);
        if !members
            .iter()
            .any(|member| member.as_ptr() == Arc::as_ptr(space))
        {
            members.push(Arc::downgrade(space));
        }
    }

    /// Whether others live.
    pub fn has_others(&self, than: &M) -> bool {
        let members = lock(&self.members);
        let mut living = members.iter().filter_map(Weak::upgrade);
        living.any(|member| member.id() != than.id() && !member.has_left())
    }

    /// The others that live, the youngest first: the nearest relatives, as a rule.
    pub fn others(&self, than: &M) -> Vec<Arc<M>> {
        let members = lock(&self.members);
        let living = members.iter().rev().filter_map(Weak::upgrade);
        living
            .filter(|member| member.id() != than.id() && !member.is_dead())
            .collect()
    }
}
