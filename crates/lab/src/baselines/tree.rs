//! The swap cache that the swap table replaced: a radix tree and a lock for every 64 MB of swap,
//! and beside them one byte per slot for its count and two for its group.
//!
//! Reimplemented in user space from the description in K. Song's series of August 2025. It is
//! cheaper than the kernel's in three ways: the root of a tree lies in its record, nodes come from
//! the tree's own free list, and a range is removed under one lock, a node at a time.

use std::sync::{
    Arc,
    atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::*},
};

use anyhow::Result;
use memfold_swap::{
    LoadError, Location, Page, Placed, Scratch, Slot, SlotRange, StoreError, Stored, Tier,
};

use super::{
    SwapDesign, ThreadStats,
    array::{Array, Atomics, SpinLock},
    clusters::{CLUSTER, Clusters, in_each_cluster},
};

/// Slots per tree: 64 MB.
const SHARD: usize = (64 << 20) / memfold_swap::PAGE_SIZE;
/// Children of a node.
const FANOUT: usize = 64;
/// Root entries of a tree.
const TOPS: usize = SHARD / (FANOUT * FANOUT);
/// Nodes that a full tree needs.
const NODES: usize = TOPS + SHARD / FANOUT;

/// A node: 576 bytes with its count, as the kernel's `xa_node`.
#[derive(Debug)]
#[repr(C, align(64))]
struct Node {
    /// Entries in a leaf, else numbers of child nodes; 0 for none.
    slots: [AtomicU64; FANOUT],
    /// Number of slots that are not 0; in a free node, the next free node. Guarded by the shard's
    /// lock.
    used: AtomicU32,
}

// SAFETY: a node consists of atomics.
unsafe impl Atomics for Node {}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    lock: SpinLock,
    top: [AtomicU32; TOPS],
    /// First node of the free list, 0 for none. Guarded by `lock`, as the next two are.
    unused: AtomicU32,
    /// Nodes that were ever in use.
    taken: AtomicU32,
    /// Nodes in the tree.
    nodes: AtomicU32,
}

/// The trees of a swap space.
#[derive(Debug)]
struct Trees {
    shards: Vec<Shard>,
    nodes: Array<Node>,
}

impl Trees {
    fn new(slots: usize) -> Result<Self> {
        let shards = slots.div_ceil(SHARD);
        Ok(Self {
            shards: (0..shards).map(|_| Shard::default()).collect(),
            nodes: Array::new(shards * NODES)?,
        })
    }

    fn node(&self, shard: usize, number: u64) -> &Node {
        &self.nodes[shard * NODES + number as usize - 1]
    }

    /// Walks down without a lock, as the kernel's look-ups do: the caller's count of the slot keeps
    /// its nodes in the tree.
    #[inline]
    fn look_up(&self, slot: usize) -> u64 {
        let (number, index) = (slot / SHARD, slot % SHARD);
        let top = self.shards[number].top[index / (FANOUT * FANOUT)].load(Acquire);
        if top == 0 {
            return 0;
        }
        let middle = self.node(number, top.into()).slots[index / FANOUT % FANOUT].load(Acquire);
        if middle == 0 {
            return 0;
        }
        self.node(number, middle).slots[index % FANOUT].load(Acquire)
    }

    #[inline]
    fn look_up_locked(&self, slot: usize) -> u64 {
        let _held = self.shards[slot / SHARD].lock.lock();
        self.look_up(slot)
    }

    fn new_node(&self, number: usize) -> u32 {
        let shard = &self.shards[number];
        shard.nodes.fetch_add(1, Relaxed);
        let unused = shard.unused.load(Relaxed);
        if unused == 0 {
            return shard.taken.fetch_add(1, Relaxed) + 1;
        }
        let node = self.node(number, unused.into());
        shard.unused.store(node.used.swap(0, Relaxed), Relaxed);
        unused
    }

    fn free_node(&self, number: usize, node: u64) {
        let shard = &self.shards[number];
        shard.nodes.fetch_sub(1, Relaxed);
        let next = shard.unused.swap(node as u32, Relaxed);
        self.node(number, node).used.store(next, Relaxed);
    }

    fn insert(&self, slot: usize, entry: u64) {
        let (number, index) = (slot / SHARD, slot % SHARD);
        let shard = &self.shards[number];
        let _held = shard.lock.lock();
        let top = &shard.top[index / (FANOUT * FANOUT)];
        let mut middle = top.load(Relaxed);
        if middle == 0 {
            middle = self.new_node(number);
            top.store(middle, Release);
        }
        let middle = self.node(number, middle.into());
        let place = &middle.slots[index / FANOUT % FANOUT];
        let mut leaf = place.load(Relaxed);
        if leaf == 0 {
            leaf = self.new_node(number).into();
            place.store(leaf, Release);
            middle.used.store(middle.used.load(Relaxed) + 1, Relaxed);
        }
        let leaf = self.node(number, leaf);
        let place = &leaf.slots[index % FANOUT];
        assert_eq!(place.load(Relaxed), 0, "slot {slot} is in the tree already");
        place.store(entry, Release);
        leaf.used.store(leaf.used.load(Relaxed) + 1, Relaxed);
    }

    /// Removes slots of one cluster, hence of one tree.
    fn remove(&self, first: usize, count: usize, mut removed: impl FnMut(u64)) {
        let number = first / SHARD;
        let shard = &self.shards[number];
        let _held = shard.lock.lock();
        let mut slot = first;
        while slot < first + count {
            let index = slot % SHARD;
            let end = (first + count).min(slot - slot % FANOUT + FANOUT);
            let top = &shard.top[index / (FANOUT * FANOUT)];
            let middle_number = u64::from(top.load(Relaxed));
            assert_ne!(middle_number, 0, "slot {slot} is not in the tree");
            let middle = self.node(number, middle_number);
            let place = &middle.slots[index / FANOUT % FANOUT];
            let leaf_number = place.load(Relaxed);
            assert_ne!(leaf_number, 0, "slot {slot} is not in the tree");
            let leaf = self.node(number, leaf_number);
            for index in slot..end {
                let place = &leaf.slots[index % FANOUT];
                let entry = place.load(Relaxed);
                assert_ne!(entry, 0, "slot {index} is not in the tree");
                place.store(0, Release);
                removed(entry);
            }
            let left = leaf.used.load(Relaxed) - (end - slot) as u32;
            leaf.used.store(left, Relaxed);
            if left == 0 {
                place.store(0, Release);
                self.free_node(number, leaf_number);
                let left = middle.used.load(Relaxed) - 1;
                middle.used.store(left, Relaxed);
                if left == 0 {
                    top.store(0, Release);
                    self.free_node(number, middle_number);
                }
            }
            slot = end;
        }
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        let nodes = |shard: &Shard| shard.nodes.load(Relaxed) as usize;
        self.shards.iter().map(nodes).sum::<usize>() * size_of::<Node>()
            + self.shards.len() * size_of::<Shard>()
    }
}

/// Count byte of a slot that is allocated but not yet stored.
const RESERVED: u8 = 0x40;
/// The group of every slot in use.
const GROUP: u16 = 1;

/// Locking of look-ups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookUp {
    /// Under the tree's lock, as insertions and deletions are.
    Locked,
    /// Without a lock, as in the kernel.
    LockFree,
}

/// A swap space whose slots are found through the trees.
pub struct TreeSpace {
    look_up: LookUp,
    tier: Arc<dyn Tier>,
    trees: Trees,
    /// One per slot, populated at once for the whole space, as the kernel's map is.
    counts: Array<AtomicU8>,
    groups: Array<AtomicU16>,
    clusters: Clusters,
    stats: ThreadStats,
    charged: AtomicU64,
    /// Unused: the tiers of the experiments store no word beside the location.
    annex: AtomicU64,
}

impl TreeSpace {
    /// A space of `slots` slots over one tier.
    pub fn new(look_up: LookUp, slots: usize, threads: usize, tier: Arc<dyn Tier>) -> Result<Self> {
        let slots = slots.next_multiple_of(CLUSTER) + CLUSTER;
        let space = Self {
            look_up,
            tier,
            trees: Trees::new(slots)?,
            counts: Array::new(slots)?,
            groups: Array::new(slots)?,
            clusters: Clusters::new(slots, threads),
            stats: ThreadStats::new(threads),
            charged: AtomicU64::new(0),
            annex: AtomicU64::new(0),
        };
        space.counts.commit();
        space.groups.commit();
        Ok(space)
    }

    /// Memory taken for slots, in bytes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.trees.bytes() + self.counts.len() * 3 + self.clusters.bytes()
    }

    fn reserve(&self, thread: usize, wanted: usize, slots: &mut Vec<usize>) -> bool {
        let taken = self.clusters.allocate(thread, wanted, |slot| {
            if self.counts[slot].load(Relaxed) != 0 {
                return false;
            }
            self.counts[slot].store(RESERVED, Relaxed);
            self.groups[slot].store(GROUP, Relaxed);
            slots.push(slot);
            true
        });
        taken > 0
    }

    /// Removes slots of one cluster and appends their locations to `freed`.
    fn release_in(&self, first: usize, count: usize, freed: &mut Vec<Location>) {
        let bytes_before = freed.len();
        {
            let _held = self.clusters.lock(first);
            for slot in first..first + count {
                let count = self.counts[slot].swap(RESERVED, Relaxed);
                assert_eq!(count, 1, "slot {slot} has another count than 1");
                let group = self.groups[slot].swap(0, Relaxed);
                assert_eq!(group, GROUP, "slot {slot} belongs to another group");
            }
            self.trees.remove(first, count, |entry| {
                freed.push(Location::from_raw(entry - 1));
            });
            for slot in first..first + count {
                self.counts[slot].store(0, Release);
            }
        }
        let bytes = freed[bytes_before..]
            .iter()
            .map(|&location| self.tier.bytes(location))
            .sum::<u64>();
        self.charged.fetch_sub(bytes, Relaxed);
        self.clusters.freed(first, count as u32);
    }
}

impl SwapDesign for TreeSpace {
    fn store(
        &self,
        thread: usize,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let mut slots = Vec::with_capacity(pages.len());
        let mut rest = pages;
        let mut bytes = 0;
        while !rest.is_empty() {
            slots.clear();
            if !self.reserve(thread, rest.len(), &mut slots) {
                return Err(StoreError::NoSlots);
            }
            let (now, later) = rest.split_at(slots.len());
            for (&number, page) in slots.iter().zip(now) {
                let slot = Slot::from_raw(number as u32);
                let Placed::At(location) = self.tier.store(slot, page, scratch)? else {
                    return Err(StoreError::NoTier);
                };
                bytes += self.tier.bytes(location);
                // A location may be 0, an entry must not.
                self.trees.insert(number, location.into_raw() + 1);
                out.push(slot);
            }
            // One lock section for the counts of the batch.
            let _held = self.clusters.lock(slots[0]);
            for &number in &slots {
                let before = self.counts[number].swap(1, Release);
                assert_eq!(before, RESERVED, "slot {number} was not reserved");
            }
            rest = later;
        }
        self.stats.stored(thread, pages.len() as u64, bytes);
        self.charged.fetch_add(bytes, Relaxed);
        Ok(())
    }

    #[inline]
    fn look_up(&self, slot: Slot) -> Option<Location> {
        let entry = match self.look_up {
            LookUp::Locked => self.trees.look_up_locked(slot.into_raw() as usize),
            LookUp::LockFree => self.trees.look_up(slot.into_raw() as usize),
        };
        entry.checked_sub(1).map(Location::from_raw)
    }

    fn load(
        &self,
        thread: usize,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let Some(location) = self.look_up(slot) else {
            panic!("{slot:?} is not in the tree");
        };
        self.tier
            .load(Stored::new(slot, location, &self.annex), out, scratch)?;
        self.stats.loaded(thread);
        Ok(())
    }

    fn release(&self, thread: usize, ranges: &[SlotRange]) {
        let mut freed = Vec::new();
        in_each_cluster(ranges, |first, count| {
            self.release_in(first, count, &mut freed);
        });
        self.stats.freed(thread, freed.len() as u64);
        self.tier.free(&mut freed);
    }

    fn used(&self) -> u64 {
        self.stats.pages()
    }
}
