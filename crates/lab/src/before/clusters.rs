//! Slots handed out a cluster at a time, as the kernel's swap allocator does: each processor has a
//! cluster of 512 slots of its own, whose lock guards the slots in it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, Ordering::*},
};

use super::array::{Held, Padded, SpinLock};

pub const CLUSTER: usize = 512;

/// A cluster is handed out again once at most this many of its slots are used, as in ours.
const OFFERED_AT: u32 = (CLUSTER - CLUSTER / 4) as u32;

/// Where a cluster is; 0 until it is used for the first time.
mod home {
    pub const HELD: u32 = 1;
    pub const FULL: u32 = 2;
    pub const LISTED: u32 = 3;
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Cluster {
    lock: SpinLock,
    used: AtomicU32,
    /// Changed under the lists' lock.
    home: AtomicU32,
}

#[derive(Debug)]
struct Lists {
    /// Clusters with room that no processor holds.
    listed: Vec<usize>,
    next: usize,
}

#[derive(Debug, Default)]
struct Cursor {
    cluster: Option<usize>,
    next: usize,
}

#[derive(Debug)]
pub struct Clusters {
    clusters: Vec<Cluster>,
    cursors: Vec<Padded<Mutex<Cursor>>>,
    lists: Mutex<Lists>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clusters {
    /// For slots up to `slots`; those of the first cluster are never handed out.
    pub fn new(slots: usize, processors: usize) -> Self {
        let count = slots.div_ceil(CLUSTER);
        Self {
            clusters: (0..count).map(|_| Cluster::default()).collect(),
            cursors: (0..processors).map(|_| Padded::default()).collect(),
            lists: Mutex::new(Lists {
                listed: Vec::with_capacity(count),
                next: 1,
            }),
        }
    }

    /// Bytes of the records of clusters.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.clusters.len() * size_of::<Cluster>()
    }

    pub fn lock(&self, slot: usize) -> Held<'_> {
        self.clusters[slot / CLUSTER].lock.lock()
    }

    /// Looks for up to `wanted` slots in the processor's cluster, under the cluster's lock, and
    /// goes on to another cluster only if there is none. `take` says whether it took the slot.
    /// Returns how many were taken; 0 if nothing is left.
    pub fn allocate(
        &self,
        processor: usize,
        wanted: usize,
        mut take: impl FnMut(usize) -> bool,
    ) -> usize {
        let mut cursor = lock(&self.cursors[processor % self.cursors.len()].0);
        // A cluster with room may turn out to be searched by nobody else but full of slots that
        // `take` refuses, so there is an end to it.
        for _ in 0..=2 * self.clusters.len() {
            if let Some(number) = cursor.cluster {
                let cluster = &self.clusters[number];
                let mut taken = 0;
                {
                    let _held = cluster.lock.lock();
                    while taken < wanted && cursor.next < CLUSTER {
                        taken += usize::from(take(number * CLUSTER + cursor.next));
                        cursor.next += 1;
                    }
                    if taken > 0 {
                        cluster.used.fetch_add(taken as u32, Relaxed);
                    }
                }
                if taken > 0 {
                    return taken;
                }
                self.let_go(number);
            }
            cursor.cluster = self.another();
            cursor.next = 0;
            if cursor.cluster.is_none() {
                break;
            }
        }
        0
    }

    fn another(&self) -> Option<usize> {
        let mut lists = lock(&self.lists);
        let number = if let Some(number) = lists.listed.pop() {
            number
        } else if lists.next < self.clusters.len() {
            lists.next += 1;
            lists.next - 1
        } else {
            // Any that has a free slot.
            (1..self.clusters.len()).find(|&number| {
                let cluster = &self.clusters[number];
                cluster.home.load(Relaxed) == home::FULL
                    && (cluster.used.load(Relaxed) as usize) < CLUSTER
            })?
        };
        self.clusters[number].home.store(home::HELD, Relaxed);
        Some(number)
    }

    fn let_go(&self, number: usize) {
        let mut lists = lock(&self.lists);
        self.clusters[number].home.store(home::FULL, Relaxed);
        self.reconsider(&mut lists, number);
    }

    fn reconsider(&self, lists: &mut Lists, number: usize) {
        let cluster = &self.clusters[number];
        if cluster.home.load(Relaxed) == home::FULL && cluster.used.load(Relaxed) <= OFFERED_AT {
            cluster.home.store(home::LISTED, Relaxed);
            lists.listed.push(number);
        }
    }

    /// Notes that `count` slots of the cluster of `slot` are free again. The caller changed them
    /// under the cluster's lock, and may have dropped it.
    pub fn freed(&self, slot: usize, count: u32) {
        let number = slot / CLUSTER;
        let before = self.clusters[number].used.fetch_sub(count, AcqRel);
        assert!(before >= count, "cluster {number} has fewer used slots");
        if before > OFFERED_AT && before - count <= OFFERED_AT {
            self.reconsider(&mut lock(&self.lists), number);
        }
    }
}
