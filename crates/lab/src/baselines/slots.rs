//! Slots with a fixed backend, and above them the virtual slots of N. Pham's series of 2026, with
//! the three optimisations of the thread on version 5, each of which can be disabled.
//!
//! *Fixed*: a slot is a location on the device. Its count lies in a swap table that changes under
//! the cluster's lock.
//!
//! *Virtual*: virtual slots have clusters of their own, found through a directory. A virtual slot's
//! entry names the device slot with the data, and a reverse entry leads back. The directory is a
//! radix tree of three levels, the depth that the published runs of 56 GB need.
//!
//! A page that was read back may keep its slot, so that reclaim need not store it again while it is
//! clean. Once half of the device is used, such cache-only slots are reclaimed for other pages.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::*},
};

use anyhow::Result;
use memfold_swap::{LoadError, Location, Page, Scratch, Slot, SlotRange, StoreError};

use super::{
    SwapDesign, ThreadStats,
    array::{Array, Padded, SpinLock},
    clusters::{CLUSTER, Clusters, in_each_cluster},
    device::{Device, Tiers},
};

/// `[cached : 1 | count : 7 | group : 4 | owner : 25 | place : 27]`; all zero if free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry(u64);

const GROUP: u64 = 1;
const CACHED: u64 = 1 << 63;
const COUNT_SHIFT: u32 = 56;
const GROUP_SHIFT: u32 = 52;
const OWNER_SHIFT: u32 = 27;

impl Entry {
    const FREE: Self = Self(0);
    /// Allocated, not yet stored: a group and no count.
    const RESERVED: Self = Self(GROUP << GROUP_SHIFT);

    fn stored(place: usize) -> Self {
        Self(Self::RESERVED.0 | 1 << COUNT_SHIFT | place as u64)
    }

    /// No count; the slot still holds the page `owner`, which was read back.
    fn cache_only(self, owner: usize) -> Self {
        Self(CACHED | Self::RESERVED.0 | (owner as u64) << OWNER_SHIFT | self.place() as u64)
    }

    fn place(self) -> usize {
        self.0 as usize & ((1 << OWNER_SHIFT) - 1)
    }

    fn count(self) -> u64 {
        self.0 >> COUNT_SHIFT & 0x7f
    }

    fn group(self) -> u64 {
        self.0 >> GROUP_SHIFT & 0xf
    }

    fn is_cache_only(self) -> bool {
        self.0 & CACHED != 0
    }
}

/// The three optimisations of the mailing-list thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Optimisations {
    /// The reverse entry has a bit for cache-only slots.
    pub cache_only_bit: bool,
    /// A range's group is checked once, under the cluster's lock that the release takes anyway.
    pub range_group: bool,
    /// Each CPU caches the virtual cluster it used last.
    pub recent_cluster: bool,
}

/// A radix tree of three levels, from a cluster's number to its record.
#[derive(Debug)]
struct Directory {
    nodes: Array<AtomicU64>,
    taken: Mutex<usize>,
}

/// Children of a directory node.
const FANOUT: usize = 64;

impl Directory {
    fn new(clusters: usize) -> Result<Self> {
        let leaves = clusters.div_ceil(FANOUT);
        let nodes = 1 + leaves.div_ceil(FANOUT) + leaves;
        Ok(Self {
            nodes: Array::new(nodes * FANOUT)?,
            taken: Mutex::new(1),
        })
    }

    fn path(cluster: usize) -> [usize; 3] {
        [
            cluster / (FANOUT * FANOUT) % FANOUT,
            cluster / FANOUT % FANOUT,
            cluster % FANOUT,
        ]
    }

    /// The record's number, which equals the cluster's; nodes hold it plus one.
    #[inline]
    fn look_up(&self, cluster: usize) -> Option<usize> {
        let mut node = 0;
        for index in Self::path(cluster) {
            node = self.nodes[node * FANOUT + index].load(Acquire) as usize;
            if node == 0 {
                return None;
            }
        }
        Some(node - 1)
    }

    fn insert(&self, cluster: usize) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let [top, middle, leaf] = Self::path(cluster);
        let mut node = 0;
        for index in [top, middle] {
            let place = &self.nodes[node * FANOUT + index];
            if place.load(Relaxed) == 0 {
                place.store(*taken as u64, Release);
                *taken += 1;
            }
            node = place.load(Relaxed) as usize;
        }
        self.nodes[node * FANOUT + leaf].store(cluster as u64 + 1, Release);
    }
}

/// A virtual cluster's record.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Record {
    lock: SpinLock,
    /// Its first entry.
    base: AtomicU64,
}

/// The virtual layer.
struct Virtual {
    optimisations: Optimisations,
    directory: Directory,
    records: Vec<Record>,
    clusters: Clusters,
    entries: Array<AtomicU64>,
    /// For each device slot, its virtual slot and [`REVERSE_CACHE_ONLY`].
    reverse: Array<AtomicU64>,
    /// `[cluster : 32 | record : 32]` used last, by thread.
    recent: Vec<Padded<AtomicU64>>,
}

/// Bit of a reverse entry: the slot is cache-only.
const REVERSE_CACHE_ONLY: u64 = 1 << 63;

impl Virtual {
    fn new(optimisations: Optimisations, slots: usize, threads: usize) -> Result<Self> {
        let count = slots.div_ceil(CLUSTER);
        Ok(Self {
            optimisations,
            directory: Directory::new(count)?,
            records: (0..count).map(|_| Record::default()).collect(),
            clusters: Clusters::new(slots, threads),
            entries: Array::new(count * CLUSTER)?,
            reverse: Array::new(slots)?,
            recent: (0..threads).map(|_| Padded::default()).collect(),
        })
    }

    /// The record of a slot's cluster.
    #[inline]
    fn record(&self, thread: usize, slot: usize) -> &Record {
        let cluster = slot / CLUSTER;
        let recent = &self.recent[thread % self.recent.len()].0;
        if self.optimisations.recent_cluster {
            let known = recent.load(Relaxed);
            if known >> 32 == cluster as u64 {
                return &self.records[known as u32 as usize];
            }
        }
        let Some(record) = self.directory.look_up(cluster) else {
            panic!("virtual cluster {cluster} is not in the directory");
        };
        if self.optimisations.recent_cluster {
            recent.store((cluster as u64) << 32 | record as u64, Relaxed);
        }
        &self.records[record]
    }

    #[inline]
    fn entry_in(&self, record: &Record, slot: usize) -> &AtomicU64 {
        &self.entries[record.base.load(Relaxed) as usize + slot % CLUSTER]
    }

    fn add_cluster(&self, slot: usize) {
        let cluster = slot / CLUSTER;
        if self.directory.look_up(cluster).is_none() {
            self.records[cluster]
                .base
                .store((cluster * CLUSTER) as u64, Relaxed);
            self.directory.insert(cluster);
        }
    }
}

/// A swap space whose slots are fixed, or virtual above fixed ones.
pub struct Slots {
    /// Device slots.
    places: Clusters,
    /// Entries of fixed slots; unused below a virtual layer.
    entries: Array<AtomicU64>,
    device: Device,
    above: Option<Virtual>,
    used: AtomicU64,
    capacity: u64,
    charged: AtomicU64,
    stats: ThreadStats,
}

impl Slots {
    /// A space of `slots` device slots; virtual if `optimisations` are given.
    pub fn new(
        tiers: Tiers,
        slots: usize,
        threads: usize,
        optimisations: Option<Optimisations>,
    ) -> Result<Self> {
        let slots = slots.next_multiple_of(CLUSTER) + CLUSTER;
        // Virtual slots are not scarce: twice as many as device slots leave room for partly used
        // clusters.
        let above = optimisations
            .map(|optimisations| Virtual::new(optimisations, 2 * slots, threads))
            .transpose()?;
        Ok(Self {
            places: Clusters::new(slots, threads),
            entries: Array::new(slots)?,
            device: Device::new(tiers, slots)?,
            above,
            used: AtomicU64::new(0),
            capacity: slots as u64,
            charged: AtomicU64::new(0),
            stats: ThreadStats::new(threads),
        })
    }

    /// Allocates device slots; once half of them are used, cache-only ones are reclaimed too.
    fn take_places(&self, thread: usize, wanted: usize, places: &mut Vec<usize>) -> bool {
        let scarce = self.used.load(Relaxed) * 2 > self.capacity;
        let taken = self.places.allocate(thread, wanted, |place| {
            let free = match &self.above {
                None => self.entries[place].load(Relaxed) == Entry::FREE.0,
                Some(above) => above.reverse[place].load(Relaxed) == 0,
            };
            let free = free || (scarce && self.take_from_cache(thread, place));
            if !free {
                return false;
            }
            match &self.above {
                None => self.entries[place].store(Entry::RESERVED.0, Relaxed),
                // Reserved; `store` writes the virtual slot.
                Some(above) => above.reverse[place].store(u64::MAX >> 1, Relaxed),
            }
            places.push(place);
            true
        });
        self.used.fetch_add(taken as u64, Relaxed);
        taken > 0
    }

    /// Frees a device slot if it is cache-only. The caller holds the lock of its cluster.
    fn take_from_cache(&self, thread: usize, place: usize) -> bool {
        let Some(above) = &self.above else {
            if !Entry(self.entries[place].load(Relaxed)).is_cache_only() {
                return false;
            }
            self.evicted(thread, place);
            return true;
        };
        let reverse = above.reverse[place].load(Relaxed);
        if above.optimisations.cache_only_bit && reverse & REVERSE_CACHE_ONLY == 0 {
            return false;
        }
        let slot = (reverse & !REVERSE_CACHE_ONLY) as usize;
        if slot >= above.entries.len() {
            // Reserved, not yet stored.
            return false;
        }
        {
            let record = above.record(thread, slot);
            let _held = record.lock.lock();
            let cell = above.entry_in(record, slot);
            let entry = Entry(cell.load(Relaxed));
            if !entry.is_cache_only() || entry.place() != place {
                return false;
            }
            cell.store(Entry::FREE.0, Release);
        }
        above.clusters.freed(slot, 1);
        self.evicted(thread, place);
        true
    }

    fn evicted(&self, thread: usize, place: usize) {
        let bytes = self.device.free([place].into_iter());
        self.charged.fetch_sub(bytes, Relaxed);
        self.used.fetch_sub(1, Relaxed);
        self.stats.freed(thread, 1);
        self.places.freed(place, 1);
    }

    /// Frees device slots that no entry refers to.
    fn free_places(&self, thread: usize, places: &[usize]) {
        for neighbours in places.chunk_by(|one, next| one / CLUSTER == next / CLUSTER) {
            let bytes = self.device.free(neighbours.iter().copied());
            self.charged.fetch_sub(bytes, Relaxed);
            {
                let _held = self.places.lock(neighbours[0]);
                for &place in neighbours {
                    match &self.above {
                        None => self.entries[place].store(Entry::FREE.0, Release),
                        Some(above) => above.reverse[place].store(0, Release),
                    }
                }
            }
            self.places.freed(neighbours[0], neighbours.len() as u32);
        }
        self.used.fetch_sub(places.len() as u64, Relaxed);
        self.stats.freed(thread, places.len() as u64);
    }

    /// Allocates `wanted` virtual slots.
    fn take_slots(above: &Virtual, thread: usize, wanted: usize, slots: &mut Vec<usize>) {
        while slots.len() < wanted {
            let left = wanted - slots.len();
            let taken = above.clusters.allocate(thread, left, |slot| {
                if above.entries[slot].load(Relaxed) != Entry::FREE.0 {
                    return false;
                }
                above.add_cluster(slot);
                above.entries[slot].store(Entry::RESERVED.0, Relaxed);
                slots.push(slot);
                true
            });
            assert!(
                taken > 0,
                "out of virtual slots, of which there are twice as many as device slots"
            );
        }
    }

    /// Changes an entry under its cluster's lock. The caller owns the slot, or is its former owner.
    fn change<R>(&self, thread: usize, slot: usize, change: impl FnOnce(&AtomicU64) -> R) -> R {
        match &self.above {
            None => {
                let _held = self.places.lock(slot);
                change(&self.entries[slot])
            }
            Some(above) => {
                let record = above.record(thread, slot);
                let _held = record.lock.lock();
                change(above.entry_in(record, slot))
            }
        }
    }

    fn set_cache_only_bit(&self, slot: usize, place: usize, set: bool) {
        if let Some(above) = &self.above
            && above.optimisations.cache_only_bit
        {
            let bit = if set { REVERSE_CACHE_ONLY } else { 0 };
            above.reverse[place].store(slot as u64 | bit, Release);
        }
    }

    /// Makes a slot whose page was read back cache-only.
    pub fn keep(&self, thread: usize, slot: Slot, owner: usize) {
        let slot = slot.into_raw() as usize;
        self.change(thread, slot, |cell| {
            let entry = Entry(cell.load(Relaxed));
            assert_eq!(entry.count(), 1, "slot {slot} has another count than 1");
            cell.store(entry.cache_only(owner).0, Release);
            self.set_cache_only_bit(slot, entry.place(), true);
        });
    }

    /// Takes a count of a cache-only slot. `false` if it was reclaimed and no longer holds the page
    /// `owner`.
    pub fn reuse(&self, thread: usize, slot: Slot, owner: usize) -> bool {
        let slot = slot.into_raw() as usize;
        self.change(thread, slot, |cell| {
            let entry = Entry(cell.load(Relaxed));
            let unchanged = entry == entry.cache_only(owner);
            if unchanged {
                cell.store(Entry::stored(entry.place()).0, Release);
                self.set_cache_only_bit(slot, entry.place(), false);
            }
            unchanged
        })
    }

    fn release_in(&self, thread: usize, first: usize, count: usize, freed: &mut Vec<usize>) {
        let take = |cell: &AtomicU64, next: Entry| {
            let entry = Entry(cell.swap(next.0, AcqRel));
            assert_eq!(
                entry.count(),
                1,
                "a slot from {first} has another count than 1"
            );
            assert_eq!(
                entry.group(),
                GROUP,
                "a slot from {first} belongs to another group"
            );
            entry.place()
        };
        let Some(above) = &self.above else {
            let _held = self.places.lock(first);
            // The slots stay reserved until the device has freed their data.
            let slots = first..first + count;
            freed.extend(slots.map(|slot| take(&self.entries[slot], Entry::RESERVED)));
            return;
        };
        if !above.optimisations.range_group {
            // Check that the whole range belongs to one group.
            for slot in first..first + count {
                let record = above.record(thread, slot);
                let entry = Entry(above.entry_in(record, slot).load(Acquire));
                assert_eq!(entry.group(), GROUP, "slot {slot} belongs to another group");
            }
        }
        {
            let record = above.record(thread, first);
            let _held = record.lock.lock();
            for slot in first..first + count {
                freed.push(take(above.entry_in(record, slot), Entry::FREE));
            }
        }
        above.clusters.freed(first, count as u32);
    }

    fn place_of(&self, thread: usize, slot: usize) -> usize {
        match &self.above {
            None => {
                let entry = Entry(self.entries[slot].load(Acquire));
                assert_eq!(entry.count(), 1, "slot {slot} has another count than 1");
                slot
            }
            Some(above) => {
                let record = above.record(thread, slot);
                let entry = Entry(above.entry_in(record, slot).load(Acquire));
                assert_eq!(entry.count(), 1, "slot {slot} has another count than 1");
                entry.place()
            }
        }
    }
}

impl SwapDesign for Slots {
    fn store(
        &self,
        thread: usize,
        pages: &[&Page],
        scratch: &mut Scratch,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let (mut places, mut slots) = (Vec::new(), Vec::new());
        let mut rest = pages;
        while !rest.is_empty() {
            places.clear();
            slots.clear();
            if !self.take_places(thread, rest.len(), &mut places) {
                return Err(StoreError::NoSlots);
            }
            let (now, later) = rest.split_at(places.len());
            let mut bytes = 0;
            for (&place, page) in places.iter().zip(now) {
                bytes += self.device.write(place, page, scratch)?;
            }
            match &self.above {
                None => {
                    let _held = self.places.lock(places[0]);
                    for &place in &places {
                        self.entries[place].store(Entry::stored(place).0, Release);
                    }
                    slots.extend_from_slice(&places);
                }
                Some(above) => {
                    Self::take_slots(above, thread, places.len(), &mut slots);
                    for (&slot, &place) in slots.iter().zip(&places) {
                        above.reverse[place].store(slot as u64, Release);
                    }
                    let mut pairs = slots.iter().zip(&places).peekable();
                    while let Some(&(&first, _)) = pairs.peek() {
                        let record = above.record(thread, first);
                        let _held = record.lock.lock();
                        let here = |pair: &(&usize, &usize)| pair.0 / CLUSTER == first / CLUSTER;
                        while let Some((&slot, &place)) = pairs.next_if(here) {
                            let cell = above.entry_in(record, slot);
                            cell.store(Entry::stored(place).0, Release);
                        }
                    }
                }
            }
            self.charged.fetch_add(bytes, Relaxed);
            self.stats.stored(thread, places.len() as u64, bytes);
            out.extend(slots.iter().map(|&slot| Slot::from_raw(slot as u32)));
            rest = later;
        }
        Ok(())
    }

    fn look_up(&self, slot: Slot) -> Option<Location> {
        Some(
            self.device
                .look_up(self.place_of(0, slot.into_raw() as usize)),
        )
    }

    fn load(
        &self,
        thread: usize,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let place = self.place_of(thread, slot.into_raw() as usize);
        self.device.read(place, out, scratch)?;
        self.stats.loaded(thread);
        Ok(())
    }

    fn release(&self, thread: usize, ranges: &[SlotRange]) {
        let mut freed = Vec::new();
        in_each_cluster(ranges, |first, count| {
            self.release_in(thread, first, count, &mut freed);
        });
        self.free_places(thread, &freed);
    }

    fn used(&self) -> u64 {
        self.stats.pages()
    }
}
