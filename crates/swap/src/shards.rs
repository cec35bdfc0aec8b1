//! The clusters that the shards of a group allocate from.

use crate::{
    slot::ClusterId,
    sync::{Mutex, MutexGuard, lock},
};

/// A CPU, or a group of threads, that allocates slots from a cluster of its own.
#[derive(Debug, Default)]
pub(crate) struct Shard {
    /// The cluster whose slots the shard hands out.
    pub(crate) held: Option<ClusterId>,
    /// The index in it that is tried next.
    pub(crate) next_index: usize,
}

/// The shards of a group.
#[derive(Debug)]
pub(crate) struct Shards(Box<[Mutex<Shard>]>);

impl Shards {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| Mutex::default()).collect())
    }

    /// Locks the shard of a thread.
    pub(crate) fn lock(&self, thread: usize) -> MutexGuard<'_, Shard> {
        lock(&self.0[thread % self.0.len()])
    }

    /// Locks one shard after another.
    pub(crate) fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.0.iter().map(lock)
    }
}
