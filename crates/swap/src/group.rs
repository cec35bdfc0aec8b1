//! Groups: accounting of memory and storage, as in memory cgroups.
//!
//! A group and its ancestors are charged for the memory and storage of its address spaces. A charge
//! is an addition, made once for a range of pages, and never fails: limits are checked before more
//! is used, so that no fault waits for one.
//!
//! A cluster belongs to one group at a time, and its slots with it. So a range of slots is charged
//! cluster by cluster, and an entry needs no bits for the group.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use crate::{
    entry::TierKind,
    shards::Shards,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// A kind of charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Charge {
    /// Resident memory of programs, including staged pages.
    Resident,
    /// The part of it that is being paged out.
    Staged,
    /// Stored pages in the pool, without the pool's overhead.
    Pool,
    /// Stored pages in the file.
    File,
    /// Stored pages in the store on other machines.
    Remote,
}

impl Charge {
    const COUNT: usize = 5;

    /// The charge for a page in this tier.
    pub(crate) fn of_tier(tier: TierKind) -> Option<Self> {
        match tier {
            TierKind::Compressed
            | TierKind::Uncompressed
            | TierKind::Recompressed
            | TierKind::Block => Some(Self::Pool),
            TierKind::File => Some(Self::File),
            TierKind::Remote => Some(Self::Remote),
            TierKind::SameFilled => None,
        }
    }
}

/// Usage of a group and its descendants, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GroupUsage {
    /// Resident memory of programs, including staged pages.
    pub resident: u64,
    /// The part of it that is being paged out.
    pub staged: u64,
    /// Stored pages in the pool.
    pub pool: u64,
    /// Stored pages in the file.
    pub file: u64,
    /// Stored pages in the store on other machines.
    pub remote: u64,
}

impl GroupUsage {
    /// Bytes of memory: everything but the file and the store on other machines.
    pub fn memory(&self) -> u64 {
        self.resident + self.pool
    }
}

/// A group's index in its space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupId(pub(crate) u32);

impl GroupId {
    pub(crate) const ROOT: Self = Self(0);
}

struct Node {
    id: GroupId,
    parent: Option<Arc<Node>>,
    charges: [AtomicU64; Charge::COUNT],
    limit: AtomicU64,
    shards: Shards,
}

/// A group of address spaces, made by [`SwapSpace::new_group`](crate::SwapSpace::new_group).
/// Clones are the same group.
///
/// ```
/// use memfold_swap::Charge;
/// # use memfold_swap::{PAGE_SIZE, Scratch, SwapConfig, SwapSpace};
/// # let config = SwapConfig { pool_capacity_pages: 4096, max_slots: 4096, ..Default::default() };
/// # let space = SwapSpace::new(zsmalloc::HeapSource::new(), config)?;
/// let parent = space.new_group(space.root_group());
/// let child = space.new_group(&parent);
/// parent.set_limit(1 << 20);
/// child.charge(Charge::Resident, 512 << 10);
/// assert_eq!(parent.usage().resident, 512 << 10);
/// assert_eq!(child.excess(768 << 10), 256 << 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Group(Arc<Node>);

impl Group {
    pub(crate) fn new(id: GroupId, parent: Option<&Group>, shards: usize) -> Self {
        Self(Arc::new(Node {
            id,
            parent: parent.map(|parent| Arc::clone(&parent.0)),
            charges: Default::default(),
            limit: AtomicU64::new(u64::MAX),
            shards: Shards::new(shards),
        }))
    }

    pub(crate) fn id(&self) -> GroupId {
        self.0.id
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.0.shards
    }

    /// The group and its ancestors.
    fn chain(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(Some(&*self.0), |node| node.parent.as_deref())
    }

    /// The parent; `None` for the root.
    pub fn parent(&self) -> Option<Group> {
        self.0.parent.clone().map(Group)
    }

    /// Charges `bytes` to the group and its ancestors.
    pub fn charge(&self, what: Charge, bytes: u64) {
        if bytes > 0 {
            for node in self.chain() {
                node.charges[what as usize].fetch_add(bytes, Relaxed);
            }
        }
    }

    /// Reverses a charge of `bytes`.
    pub fn uncharge(&self, what: Charge, bytes: u64) {
        if bytes > 0 {
            for node in self.chain() {
                node.charges[what as usize].fetch_sub(bytes, Relaxed);
            }
        }
    }

    /// Sets a charge that is measured instead of counted, for a group without children.
    pub fn set(&self, what: Charge, bytes: u64) {
        let before = self.0.charges[what as usize].swap(bytes, Relaxed);
        for node in self.chain().skip(1) {
            node.charges[what as usize].fetch_add(bytes.wrapping_sub(before), Relaxed);
        }
    }

    /// One kind of usage of the group and its descendants, in bytes.
    pub fn charged(&self, what: Charge) -> u64 {
        self.0.charged(what)
    }

    /// Usage of the group and its descendants. Exact while they are idle; a charge whose reversal
    /// is seen first counts as zero.
    pub fn usage(&self) -> GroupUsage {
        self.0.usage()
    }

    /// Sets the limit on memory of the group and its descendants.
    pub fn set_limit(&self, bytes: u64) {
        self.0.limit.store(bytes, Relaxed);
    }

    /// Bytes by which the group or one of its ancestors, the worst, would exceed its limit after
    /// using `more` bytes. To be checked once for a range.
    pub fn excess(&self, more: u64) -> u64 {
        let excess = |node: &Node| {
            let used = node.usage().memory().saturating_add(more);
            used.saturating_sub(node.limit.load(Relaxed))
        };
        self.chain().map(excess).max().unwrap_or(0)
    }
}

impl Node {
    fn charged(&self, what: Charge) -> u64 {
        // Additions and subtractions may be seen in any order, so a gauge may be negative for a
        // moment.
        let value = self.charges[what as usize].load(Relaxed);
        if value > u64::MAX / 2 { 0 } else { value }
    }

    fn usage(&self) -> GroupUsage {
        GroupUsage {
            resident: self.charged(Charge::Resident),
            staged: self.charged(Charge::Staged),
            pool: self.charged(Charge::Pool),
            file: self.charged(Charge::File),
            remote: self.charged(Charge::Remote),
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("id", &self.0.id.0)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

/// The groups of a space, by index.
#[derive(Debug)]
pub(crate) struct Groups {
    by_id: RwLock<Vec<Option<Group>>>,
    root: Group,
    shards: usize,
}

impl Groups {
    pub(crate) fn new(shards: usize) -> Self {
        let root = Group::new(GroupId::ROOT, None, shards);
        Self {
            by_id: RwLock::new(vec![Some(root.clone())]),
            root,
            shards,
        }
    }

    pub(crate) fn root(&self) -> &Group {
        &self.root
    }

    /// A new group below `parent`.
    pub(crate) fn add(&self, parent: &Group) -> Group {
        let mut groups = self.by_id.write().unwrap_or_else(PoisonError::into_inner);
        let number = groups
            .iter()
            .position(Option::is_none)
            .unwrap_or(groups.len());
        let id = GroupId(u32::try_from(number).expect("fewer than 2^32 groups"));
        let group = Group::new(id, Some(parent), self.shards);
        if number == groups.len() {
            groups.push(None);
        }
        groups[number] = Some(group.clone());
        group
    }

    /// Removes a group after `hand_over` has moved what it owns to its parent, which no look-up of
    /// groups overlaps.
    pub(crate) fn remove(&self, group: &Group, hand_over: impl FnOnce(&Group)) {
        let Some(parent) = group.parent() else { return };
        let mut groups = self.by_id.write().unwrap_or_else(PoisonError::into_inner);
        hand_over(&parent);
        groups[group.id().0 as usize] = None;
    }

    /// The groups, which do not change while the guard is held.
    pub(crate) fn read(&self) -> GroupsGuard<'_> {
        GroupsGuard(self.by_id.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Read access to the groups of a space.
pub(crate) struct GroupsGuard<'a>(RwLockReadGuard<'a, Vec<Option<Group>>>);

impl GroupsGuard<'_> {
    pub(crate) fn get(&self, id: GroupId) -> &Group {
        match self.0.get(id.0 as usize) {
            Some(Some(group)) => group,
            _ => panic!("a cluster belongs to group {}, which does not exist", id.0),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Group> {
        self.0.iter().flatten()
    }
}
