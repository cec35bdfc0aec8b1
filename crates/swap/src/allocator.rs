//! Slot allocation: clusters held by shards, and lists of clusters with room.
//!
//! Each shard (a CPU, or a group of threads) holds one cluster and allocates its free slots in
//! order, so that pages stored together get neighbouring slots and shards do not contend. Lock
//! order: a shard, then the lists.

use std::sync::Arc;

use zsmalloc::PageSource;

use crate::{
    error::StoreError,
    group::{Group, GroupId},
    slot::{CLUSTER_SLOTS, ClusterId, Slot},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering::*},
        lock,
    },
    table::{METAS_PER_PAGE, SwapTable, TablePage},
};

/// Used slots down to which a full cluster is offered to the shards again. A quarter is free then,
/// so the shard that takes it need not come back soon.
const OFFERED_AT: u32 = (CLUSTER_SLOTS - CLUSTER_SLOTS / 4) as u32;

/// Where a cluster is: the values of `ClusterMeta::home`.
mod home {
    /// It has no pages; its number is unused.
    pub(super) const ABSENT: u32 = 0;
    /// A shard allocates its slots.
    pub(super) const HELD: u32 = 1;
    /// It is too full to be offered.
    pub(super) const FULL: u32 = 2;
    /// It is in the list of clusters with room.
    pub(super) const OFFERED: u32 = 3;
    /// Its pages are being discarded.
    pub(super) const LEAVING: u32 = 4;
    /// It is empty, and is discarded together with others unless it is used again before.
    pub(super) const EMPTIED: u32 = 5;
}

/// Emptied clusters that are discarded at once. Each discard costs a TLB shootdown on every CPU that runs the
/// process. More keep more memory of an empty space, a page each, or two where it has an annex.
const DISCARDED_TOGETHER: usize = if cfg!(any(loom, miri)) { 2 } else { 32 };

/// The clusters of a group.
#[derive(Debug, Default)]
struct GroupClusters {
    /// Those with room that no shard holds. There is memory for all.
    offered: Vec<ClusterId>,
    /// How many there are, wherever they are, also emptied ones.
    count: usize,
}

#[derive(Debug, Default)]
struct Lists {
    /// By group.
    groups: Vec<GroupClusters>,
    /// Emptied clusters, fewer than `DISCARDED_TOGETHER`, of any group.
    emptied: Vec<ClusterId>,
    /// Unused cluster numbers below `next`.
    absent: Vec<ClusterId>,
    /// The first cluster number never used.
    next: u32,
    /// Pages of cluster records committed so far.
    meta_pages: usize,
}

impl Lists {
    /// Reserves memory for one more cluster of a group in the lists.
    fn make_room(&mut self, group: GroupId) -> Result<(), StoreError> {
        let no_memory = |_| StoreError::NoMemory;
        let groups = group.0 as usize + 1;
        if groups > self.groups.len() {
            self.groups
                .try_reserve(groups - self.groups.len())
                .map_err(no_memory)?;
            self.groups.resize_with(groups, GroupClusters::default);
        }
        let clusters = self.next as usize + 1;
        let own = &mut self.groups[group.0 as usize];
        for (list, most) in [
            (&mut own.offered, own.count + 1),
            (&mut self.absent, clusters),
        ] {
            list.try_reserve(most - list.len()).map_err(no_memory)?;
        }
        Ok(())
    }

    fn of_group(&mut self, group: u32) -> &mut GroupClusters {
        &mut self.groups[group as usize]
    }
}

/// Allocates and frees slots.
#[derive(Debug)]
pub(crate) struct SlotAllocator<S: PageSource> {
    table: Arc<SwapTable<S>>,
    lists: Mutex<Lists>,
    /// Resident pages of tables, annexes and records.
    resident_pages: AtomicU64,
    heap_bytes: AtomicU64,
}

impl<S: PageSource> SlotAllocator<S> {
    pub(crate) fn new(table: Arc<SwapTable<S>>) -> Self {
        let lists = Lists {
            next: 1,
            emptied: Vec::with_capacity(DISCARDED_TOGETHER),
            ..Lists::default()
        };
        Self {
            table,
            lists: Mutex::new(lists),
            resident_pages: AtomicU64::new(0),
            heap_bytes: AtomicU64::new(0),
        }
    }

    /// Resident pages of swap tables, annexes and cluster records.
    pub(crate) fn resident_pages(&self) -> u64 {
        self.resident_pages.load(Relaxed)
    }

    /// Bytes of heap of the lists, roughly.
    pub(crate) fn heap_bytes(&self) -> u64 {
        self.heap_bytes.load(Relaxed)
    }

    fn note_heap_bytes(&self, lists: &Lists) {
        let offered = lists.groups.iter().map(|group| group.offered.capacity());
        let offered: usize = offered.sum();
        let clusters = offered + lists.absent.capacity() + lists.emptied.capacity();
        self.heap_bytes
            .store((clusters * size_of::<ClusterId>()) as u64, Relaxed);
    }

    /// Reserves up to `wanted` free slots with ascending numbers, at least one, and passes them to
    /// `take`.
    pub(crate) fn reserve(
        &self,
        group: &Group,
        shard: usize,
        wanted: usize,
        mut take: impl FnMut(Slot),
    ) -> Result<usize, StoreError> {
        let mut shard = group.shards().lock(shard);
        loop {
            if let Some(cluster) = shard.held {
                let taken = self.reserve_in(cluster, &mut shard.next_index, wanted, &mut take);
                if taken > 0 {
                    return Ok(taken);
                }
                self.let_go(cluster);
                shard.held = None;
            }
            shard.held = Some(self.take_cluster(group.id())?);
            shard.next_index = 0;
        }
    }

    fn reserve_in(
        &self,
        cluster: ClusterId,
        next_index: &mut usize,
        wanted: usize,
        take: &mut impl FnMut(Slot),
    ) -> usize {
        let mut taken = 0;
        while taken < wanted && *next_index < CLUSTER_SLOTS {
            let slot = cluster.slot(*next_index);
            *next_index += 1;
            if self.table.entry(slot).reserve() {
                take(slot);
                taken += 1;
            }
        }
        if taken > 0 {
            self.table
                .meta(cluster)
                .used
                .fetch_add(taken as u32, AcqRel);
        }
        taken
    }

    /// Takes a cluster with room for a shard of `group`.
    fn take_cluster(&self, group: GroupId) -> Result<ClusterId, StoreError> {
        let mut lists = lock(&self.lists);
        let own = lists.groups.get_mut(group.0 as usize);
        if let Some(cluster) = own.and_then(|own| own.offered.pop()) {
            self.set_home(cluster, home::OFFERED, home::HELD);
            return Ok(cluster);
        }
        // Reserve now: discarding a cluster, or offering it, must not need memory.
        lists.make_room(group)?;
        self.note_heap_bytes(&lists);
        if let Some(cluster) = lists.emptied.pop() {
            self.set_home(cluster, home::EMPTIED, home::HELD);
            let before = self.table.meta(cluster).group.swap(group.0, Relaxed);
            lists.of_group(before).count -= 1;
            lists.of_group(group.0).count += 1;
            return Ok(cluster);
        }
        if let Some(cluster) = self.absent_cluster(&mut lists)? {
            self.table.commit(TablePage::Entries(cluster))?;
            self.resident_pages.fetch_add(1, Relaxed);
            if lists.absent.last() == Some(&cluster) {
                lists.absent.pop();
            } else {
                lists.next += 1;
            }
            self.set_home(cluster, home::ABSENT, home::HELD);
            self.table.meta(cluster).group.store(group.0, Relaxed);
            lists.of_group(group.0).count += 1;
            return Ok(cluster);
        }
        // All clusters are in use: take any with a free slot.
        for number in 1..lists.next {
            let cluster = ClusterId(number);
            let meta = self.table.meta(cluster);
            if meta.home.load(Relaxed) == home::FULL
                && meta.group.load(Relaxed) == group.0
                && (meta.used.load(Acquire) as usize) < CLUSTER_SLOTS
            {
                self.set_home(cluster, home::FULL, home::HELD);
                return Ok(cluster);
            }
        }
        Err(StoreError::NoSlots)
    }

    /// An unused cluster number, which stays in the lists until its pages are committed.
    fn absent_cluster(&self, lists: &mut Lists) -> Result<Option<ClusterId>, StoreError> {
        if let Some(&cluster) = lists.absent.last() {
            return Ok(Some(cluster));
        }
        let cluster = ClusterId(lists.next);
        if cluster.number() >= self.table.clusters() {
            return Ok(None);
        }
        if cluster.number() / METAS_PER_PAGE >= lists.meta_pages {
            self.table.commit(TablePage::Metas(lists.meta_pages))?;
            self.resident_pages.fetch_add(1, Relaxed);
            lists.meta_pages += 1;
        }
        Ok(Some(cluster))
    }

    fn set_home(&self, cluster: ClusterId, from: u32, to: u32) {
        let found = self.table.meta(cluster).home.swap(to, Relaxed);
        assert_eq!(found, from, "cluster {} is in the wrong state", cluster.0);
    }

    /// Puts a cluster that its shard gives up on a list.
    fn let_go(&self, cluster: ClusterId) {
        let mut leaving = Leaving::default();
        let mut lists = lock(&self.lists);
        self.set_home(cluster, home::HELD, home::FULL);
        self.reconsider(&mut lists, cluster, &mut leaving);
        drop(lists);
        self.give_back(leaving);
    }

    /// Accounts for `count` slots of `cluster` whose entries were freed. Adds the cluster to
    /// `leaving` if it is to be discarded.
    pub(crate) fn freed(&self, cluster: ClusterId, count: u32, leaving: &mut Leaving) {
        let before = self.table.meta(cluster).used.fetch_sub(count, AcqRel);
        assert!(
            before >= count,
            "cluster {} has fewer used slots than were freed",
            cluster.0
        );
        let after = before - count;
        // The thread that crosses a threshold checks under the lock, and so does a shard that gives
        // the cluster up: one of the two sees both that it has room and that no shard holds it.
        if after == 0 || (before > OFFERED_AT && after <= OFFERED_AT) {
            self.reconsider(&mut lock(&self.lists), cluster, leaving);
        }
    }

    /// Puts a cluster on the list for its number of used slots.
    fn reconsider(&self, lists: &mut Lists, cluster: ClusterId, leaving: &mut Leaving) {
        let meta = self.table.meta(cluster);
        let home = meta.home.load(Relaxed);
        if home != home::FULL && home != home::OFFERED {
            return;
        }
        let used = meta.used.load(Acquire);
        if used == 0 && meta.walkers.load(Relaxed) == 0 {
            if home == home::OFFERED {
                self.unlist(lists, cluster);
            }
            self.set_home(cluster, home, home::LEAVING);
            leaving.clusters.push(cluster);
        } else if used <= OFFERED_AT && home == home::FULL {
            self.offer(lists, cluster);
        }
    }

    fn offer(&self, lists: &mut Lists, cluster: ClusterId) {
        let meta = self.table.meta(cluster);
        let offered = &mut lists.of_group(meta.group.load(Relaxed)).offered;
        debug_assert!(offered.len() < offered.capacity(), "an offer needs memory");
        meta.list_index.store(offered.len() as u32, Relaxed);
        offered.push(cluster);
        self.set_home(cluster, home::FULL, home::OFFERED);
    }

    fn unlist(&self, lists: &mut Lists, cluster: ClusterId) {
        let meta = self.table.meta(cluster);
        let index = meta.list_index.load(Relaxed) as usize;
        let offered = &mut lists.of_group(meta.group.load(Relaxed)).offered;
        let removed = offered.swap_remove(index);
        assert_eq!(removed, cluster, "the list of clusters with room is wrong");
        if let Some(&moved) = offered.get(index) {
            self.table
                .meta(moved)
                .list_index
                .store(index as u32, Relaxed);
        }
    }

    /// Takes emptied clusters, and discards the pages of all that were once they are enough.
    pub(crate) fn give_back(&self, mut leaving: Leaving) {
        if leaving.clusters.is_empty() {
            return;
        }
        let mut lists = lock(&self.lists);
        if lists.emptied.len() + leaving.clusters.len() < DISCARDED_TOGETHER {
            for cluster in leaving.clusters {
                self.set_home(cluster, home::LEAVING, home::EMPTIED);
                lists.emptied.push(cluster);
            }
            return;
        }
        self.take_emptied(&mut lists, &mut leaving);
        drop(lists);
        self.discard(leaving);
    }

    /// Adds the clusters that wait to be discarded.
    fn take_emptied(&self, lists: &mut Lists, leaving: &mut Leaving) {
        for cluster in lists.emptied.drain(..) {
            self.set_home(cluster, home::EMPTIED, home::LEAVING);
            leaving.clusters.push(cluster);
        }
    }

    /// Discards the pages of emptied clusters, with no lock held.
    fn discard(&self, leaving: Leaving) {
        let mut pages = Vec::with_capacity(2 * leaving.clusters.len());
        for &cluster in &leaving.clusters {
            pages.push(TablePage::Entries(cluster));
            if self.table.meta(cluster).has_annex.load(Acquire) != 0 {
                pages.push(TablePage::Annex(cluster));
            }
        }
        // SAFETY: the clusters are `LEAVING`, so no shard reserves their slots and no walk reads
        // them; all their slots are free, so no count is held, and their entries are zero.
        let discarded = unsafe { self.table.discard(&pages) };
        let mut lists = lock(&self.lists);
        if discarded.is_ok() {
            self.resident_pages.fetch_sub(pages.len() as u64, Relaxed);
            for cluster in leaving.clusters {
                let meta = self.table.meta(cluster);
                meta.has_annex.store(0, Release);
                self.set_home(cluster, home::LEAVING, home::ABSENT);
                lists.of_group(meta.group.load(Relaxed)).count -= 1;
                lists.absent.push(cluster);
            }
        } else {
            // They are still resident: reuse them as empty clusters.
            for cluster in leaving.clusters {
                self.set_home(cluster, home::LEAVING, home::FULL);
                self.offer(&mut lists, cluster);
            }
        }
    }

    /// The most clusters in use at a time so far.
    pub(crate) fn clusters_used(&self) -> usize {
        lock(&self.lists).next as usize - 1
    }

    /// Whether a walk that arrives at this cluster has seen all.
    pub(crate) fn is_past_end(&self, cluster: ClusterId) -> bool {
        cluster.0 >= lock(&self.lists).next
    }

    /// Runs `walk` while the cluster cannot be discarded; does nothing if it has no table.
    pub(crate) fn walk(&self, cluster: ClusterId, walk: impl FnOnce()) {
        let meta = self.table.meta(cluster);
        {
            let _lists = lock(&self.lists);
            if !matches!(
                meta.home.load(Relaxed),
                home::HELD | home::FULL | home::OFFERED
            ) {
                return;
            }
            meta.walkers.fetch_add(1, Relaxed);
        }
        walk();
        let mut leaving = Leaving::default();
        let mut lists = lock(&self.lists);
        meta.walkers.fetch_sub(1, Relaxed);
        self.reconsider(&mut lists, cluster, &mut leaving);
        drop(lists);
        self.give_back(leaving);
    }

    /// Commits the annex of `slot`'s cluster if it is not yet. The caller has reserved the slot or
    /// holds a count.
    pub(crate) fn take_annex(&self, slot: Slot) -> Result<(), StoreError> {
        let meta = self.table.meta(slot.cluster());
        if meta.has_annex.load(Acquire) != 0 {
            return Ok(());
        }
        let _lists: MutexGuard<'_, Lists> = lock(&self.lists);
        if meta.has_annex.load(Acquire) == 0 {
            self.table.commit(TablePage::Annex(slot.cluster()))?;
            self.resident_pages.fetch_add(1, Relaxed);
            meta.has_annex.store(1, Release);
        }
        Ok(())
    }

    /// Takes the clusters from the shards of a group, or only those that are empty, and discards all that
    /// are empty.
    pub(crate) fn let_go_of(&self, group: &Group, only_empty: bool) {
        for mut shard in group.shards().each() {
            let goes = |cluster: &mut ClusterId| {
                !only_empty || self.table.meta(*cluster).used.load(Acquire) == 0
            };
            if let Some(cluster) = shard.held.take_if(goes) {
                self.let_go(cluster);
            }
        }
        let mut leaving = Leaving::default();
        self.take_emptied(&mut lock(&self.lists), &mut leaving);
        if !leaving.clusters.is_empty() {
            self.discard(leaving);
        }
    }

    /// The group that a cluster belongs to.
    pub(crate) fn group_of(&self, cluster: ClusterId) -> GroupId {
        GroupId(self.table.meta(cluster).group.load(Relaxed))
    }

    /// Moves all clusters of one group to another. The shards of the first must hold none. Returns the number of
    /// records that it looked at.
    pub(crate) fn hand_over(&self, from: GroupId, to: GroupId) -> usize {
        let mut lists = lock(&self.lists);
        let lists = &mut *lists;
        let moved = lists.groups.get_mut(from.0 as usize);
        let moved = moved.map(std::mem::take).unwrap_or_default();
        let (mut left, mut numbers) = (moved.count, 1..lists.next);
        while left > 0
            && let Some(number) = numbers.next()
        {
            let meta = self.table.meta(ClusterId(number));
            // An absent cluster still names its last group, and gets another one when it is taken.
            if meta.group.load(Relaxed) == from.0 && meta.home.load(Relaxed) != home::ABSENT {
                meta.group.store(to.0, Relaxed);
                left -= 1;
            }
        }
        debug_assert_eq!(left, 0, "a group has fewer clusters than were counted");
        let looked_at = numbers.start as usize - 1;
        if moved.count == 0 {
            return looked_at;
        }
        let groups = to.0 as usize + 1;
        if groups > lists.groups.len() {
            lists.groups.resize_with(groups, GroupClusters::default);
        }
        // Room for every cluster, so that a release needs no memory.
        let own = lists.of_group(to.0);
        own.count += moved.count;
        own.offered.reserve(own.count - own.offered.len());
        for cluster in moved.offered {
            self.set_home(cluster, home::OFFERED, home::FULL);
            self.offer(lists, cluster);
        }
        self.note_heap_bytes(lists);
        looked_at
    }
}

/// Emptied clusters that are to be discarded.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    clusters: Vec<ClusterId>,
}

/// What Miri cannot run.
#[cfg(test)]
mod with_codec {
    use crate::{CLUSTER_SLOTS, PAGE_SIZE, Scratch, SwapConfig, SwapSpace, slot::ClusterId};
    use zsmalloc::HeapSource;

    /// A group's end holds up all that store meanwhile.
    #[test]
    fn a_group_that_ends_looks_no_further_than_its_last_cluster() {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 10,
            max_slots: 1 << 20,
            shards: 1,
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).unwrap();
        let (mut scratch, page) = (Scratch::new(), [1; PAGE_SIZE]);
        let root = space.root_group();
        let [group, empty] = [(); 2].map(|()| space.new_group(root));
        let mut store = |group, clusters: usize| -> Vec<_> {
            (0..clusters * CLUSTER_SLOTS)
                .map(|_| space.store_for(group, &page, &mut scratch).unwrap())
                .collect()
        };
        // From now on these are absent, and name the group.
        let gone = store(&group, 40);
        gone.into_iter().for_each(|slot| space.release(slot));
        space.allocator.let_go_of(&group, false);
        store(root, 2);
        let own = store(&group, 3);
        space.allocator.let_go_of(&group, false);
        assert_eq!(space.allocator.hand_over(empty.id(), root.id()), 0);
        let looked_at = space.allocator.hand_over(group.id(), root.id());
        let clusters = own.iter().map(|slot| slot.cluster());
        assert!(
            clusters
                .clone()
                .all(|one| space.allocator.group_of(one) == root.id())
        );
        assert_eq!(Some(looked_at), clusters.map(ClusterId::number).max());
        assert!(looked_at < space.allocator.clusters_used());
        assert_eq!(space.allocator.hand_over(group.id(), root.id()), 0);
    }

    #[test]
    fn a_group_takes_memory_for_its_own_clusters_alone() {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 10,
            max_slots: 1 << 20,
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).unwrap();
        let mut scratch = Scratch::new();
        for _ in 0..1000 * CLUSTER_SLOTS {
            space.store(&[1; PAGE_SIZE], &mut scratch).unwrap();
        }
        let before = space.allocator.heap_bytes();
        let groups: Vec<_> = (0..100)
            .map(|_| {
                let group = space.new_group(space.root_group());
                let page = [1; PAGE_SIZE];
                space.store_for(&group, &page, &mut scratch).unwrap();
                group
            })
            .collect();
        let grown = space.allocator.heap_bytes() - before;
        assert!(
            grown < 100 * 64,
            "{grown} bytes for {} groups",
            groups.len()
        );
    }
}
