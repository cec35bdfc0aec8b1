//! A slot allocator as the kernel's: each CPU allocates from its own cluster of 512 slots, whose
//! lock guards the slots in it.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, Ordering::*},
};

use memfold_swap::SlotRange;

use super::array::{Held, Padded, SpinLock};

/// Slots per cluster.
pub const CLUSTER: usize = 512;

/// A full cluster goes back to the list once at most this many of its slots are used, as in
/// memfold's allocator. A larger value reuses fragmented clusters sooner.
const LISTED_AT: u32 = (CLUSTER - CLUSTER / 4) as u32;

/// Where a cluster is; 0 before its first use.
mod home {
    /// A CPU allocates from it.
    pub const HELD: u32 = 1;
    /// On no list: too few free slots.
    pub const FULL: u32 = 2;
    /// On [`super::Lists::listed`].
    pub const LISTED: u32 = 3;
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Cluster {
    lock: SpinLock,
    used: AtomicU32,
    /// One of [`home`]; changed under the lock of the lists.
    home: AtomicU32,
}

#[derive(Debug)]
struct Lists {
    /// Clusters with free slots that no CPU holds.
    listed: Vec<usize>,
    /// The first cluster that was never used.
    next: usize,
}

#[derive(Debug, Default)]
struct Cursor {
    cluster: Option<usize>,
    next: usize,
}

/// The clusters of a space, and the cluster that each CPU allocates from.
#[derive(Debug)]
pub struct Clusters {
    all: Vec<Cluster>,
    cursors: Vec<Padded<Mutex<Cursor>>>,
    lists: Mutex<Lists>,
}

/// Calls `run` with the first slot and the number of slots of each part of the ranges that lies in
/// one cluster.
pub fn in_each_cluster(ranges: &[SlotRange], mut run: impl FnMut(usize, usize)) {
    for range in ranges {
        let mut first = range.start().into_raw() as usize;
        let end = first + range.count() as usize;
        while first < end {
            let here = (CLUSTER - first % CLUSTER).min(end - first);
            run(first, here);
            first += here;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clusters {
    /// Clusters for slots below `slots`; the first cluster is never allocated from.
    pub fn new(slots: usize, cpus: usize) -> Self {
        let count = slots.div_ceil(CLUSTER);
        Self {
            all: (0..count).map(|_| Cluster::default()).collect(),
            cursors: (0..cpus).map(|_| Padded::default()).collect(),
            lists: Mutex::new(Lists {
                listed: Vec::with_capacity(count),
                next: 1,
            }),
        }
    }

    /// Memory of the clusters' records, in bytes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.all.len() * size_of::<Cluster>()
    }

    /// Locks the cluster of a slot.
    pub fn lock(&self, slot: usize) -> Held<'_> {
        self.all[slot / CLUSTER].lock.lock()
    }

    /// Allocates up to `wanted` slots from the CPU's cluster, under its lock, and tries another
    /// cluster only if it has none. `take` returns whether it took the slot offered. Returns the
    /// number of slots taken; 0 if the space is full.
    pub fn allocate(
        &self,
        cpu: usize,
        wanted: usize,
        mut take: impl FnMut(usize) -> bool,
    ) -> usize {
        let mut cursor = lock(&self.cursors[cpu % self.cursors.len()].0);
        // Bounded: a cluster with free slots may consist of slots that `take` refuses.
        for _ in 0..=2 * self.all.len() {
            if let Some(number) = cursor.cluster {
                let cluster = &self.all[number];
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
                self.release(number);
            }
            cursor.cluster = self.next_cluster();
            cursor.next = 0;
            if cursor.cluster.is_none() {
                break;
            }
        }
        0
    }

    fn next_cluster(&self) -> Option<usize> {
        let mut lists = lock(&self.lists);
        let number = if let Some(number) = lists.listed.pop() {
            number
        } else if lists.next < self.all.len() {
            lists.next += 1;
            lists.next - 1
        } else {
            // Fall back to any cluster with a free slot.
            (1..self.all.len()).find(|&number| {
                let cluster = &self.all[number];
                cluster.home.load(Relaxed) == home::FULL
                    && (cluster.used.load(Relaxed) as usize) < CLUSTER
            })?
        };
        self.all[number].home.store(home::HELD, Relaxed);
        Some(number)
    }

    fn release(&self, number: usize) {
        let mut lists = lock(&self.lists);
        self.all[number].home.store(home::FULL, Relaxed);
        self.list_if_free(&mut lists, number);
    }

    fn list_if_free(&self, lists: &mut Lists, number: usize) {
        let cluster = &self.all[number];
        if cluster.home.load(Relaxed) == home::FULL && cluster.used.load(Relaxed) <= LISTED_AT {
            cluster.home.store(home::LISTED, Relaxed);
            lists.listed.push(number);
        }
    }

    /// Accounts for `count` freed slots in the cluster of `slot`. The caller freed them under the
    /// cluster's lock, which it may have dropped.
    pub fn freed(&self, slot: usize, count: u32) {
        let number = slot / CLUSTER;
        let before = self.all[number].used.fetch_sub(count, AcqRel);
        assert!(
            before >= count,
            "freed {count} slots of cluster {number}, which has {before}"
        );
        if before > LISTED_AT && before - count <= LISTED_AT {
            self.list_if_free(&mut lock(&self.lists), number);
        }
    }
}
