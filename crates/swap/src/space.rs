//! The swap space.

use std::{fmt, sync::Arc};

use zsmalloc::{HugePageLimit, PageSource, Pool};

use crate::{
    PAGE_SIZE,
    allocator::SlotAllocator,
    codec::Codec,
    config::{BlockShape, SwapConfig},
    counters::{Counters, Usage, thread_number},
    counts::{CountError, OverflowCounts},
    entry::{Entry, Location, TierKind, wrong_entry},
    error::{LoadError, NewSwapSpaceError},
    grace::Grace,
    group::{Group, Groups},
    migrator::Migrator,
    page::Page,
    scratch::Scratch,
    slot::{CLUSTER_SLOTS, Slot},
    source::SharedSource,
    sync::{Mutex, atomic::AtomicUsize},
    table::SwapTable,
    tier::{BlockTier, CompressedTier, SameFilledTier, Stored, Tier, UncompressedTier},
};

const DEFAULT_SHARDS: usize = 8;

/// A swap space: stores pages and loads them by their slots.
///
/// Slots are virtual, reference-counted, and take 8 bytes each. Any number of threads may use a
/// space. Operations on many slots or the whole space (bulk releases, scans, evacuation,
/// compaction) take long; all others do not.
///
/// A caller may use a slot only while it holds one of its counts. The space checks what it can: an
/// operation on a slot that is not in use panics, and a load that finds another slot's data is
/// refused.
///
/// ```
/// use memfold_swap::{PAGE_SIZE, Scratch, SwapConfig, SwapSpace};
/// use zsmalloc::HeapSource;
///
/// let config = SwapConfig { pool_capacity_pages: 4096, max_slots: 4096, ..Default::default() };
/// let space = SwapSpace::new(HeapSource::new(), config)?;
/// let mut scratch = Scratch::new();
///
/// let slot = space.store(&[7; PAGE_SIZE], &mut scratch)?;
/// // Two owners, after a fork.
/// space.duplicate(slot)?;
/// space.release(slot);
/// let mut page = [0; PAGE_SIZE];
/// space.load(slot, &mut page, &mut scratch)?;
/// assert_eq!(page, [7; PAGE_SIZE]);
/// space.release(slot);
/// assert_eq!(space.usage().stored_pages, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SwapSpace<S: PageSource> {
    pub(crate) table: Arc<SwapTable<S>>,
    pub(crate) allocator: SlotAllocator<S>,
    pub(crate) overflow: OverflowCounts,
    pub(crate) pool: Arc<Pool<SharedSource<S>>>,
    /// The tiers outside of memory, in the order in which pages are offered to them.
    pub(crate) outside: [TierKind; 2],
    pub(crate) tiers: Tiers,
    pub(crate) blocks: Arc<BlockTier<SharedSource<S>>>,
    pub(crate) blocks_in_background: BlockShape,
    pub(crate) blocks_for_room: BlockShape,
    /// Threads that wait for the migrator, for which scans give it up.
    pub(crate) migrator_wanted: AtomicUsize,
    /// Loads among them, for which write-back gives it up, too.
    pub(crate) loads_waiting: AtomicUsize,
    pub(crate) block_saving: u64,
    pub(crate) counters: Counters,
    pub(crate) groups: Groups,
    pub(crate) grace: Grace,
    pub(crate) migrator: Mutex<Migrator>,
}

impl<S: PageSource + 'static> SwapSpace<S> {
    /// A space with the tiers for same-filled, compressed and incompressible pages.
    ///
    /// # Errors
    ///
    /// If a value of the configuration is out of range, or the source or the heap refuses memory.
    pub fn new(source: S, config: SwapConfig) -> Result<Self, NewSwapSpaceError> {
        Self::with_tiers(source, config, |tier| tier)
    }

    /// A space by the first of these configurations for which there is address space
    /// ([`SwapConfig::for_pool_of`]), with a source of its own.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), for the last of them.
    pub fn new_that_fits(
        mut source: impl FnMut() -> S,
        configs: impl IntoIterator<Item = SwapConfig>,
    ) -> Result<Self, NewSwapSpaceError> {
        let mut refused = NewSwapSpaceError::Config("there must be a configuration");
        for config in configs {
            match Self::new(source(), config) {
                Err(error) if error.is_for_want_of_addresses() => refused = error,
                other => return other,
            }
        }
        Err(refused)
    }

    /// Like [`new`](Self::new), with each tier passed through `wrap`, for tests and measurements.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_tiers(
        source: S,
        config: SwapConfig,
        wrap: impl FnMut(Box<dyn Tier>) -> Box<dyn Tier>,
    ) -> Result<Self, NewSwapSpaceError> {
        config.check()?;
        let shards = match config.shards {
            0 => DEFAULT_SHARDS,
            shards => shards,
        };
        let source = Arc::new(source);
        let clusters = config.max_slots.div_ceil(CLUSTER_SLOTS);
        let table = Arc::new(SwapTable::new(Arc::clone(&source), clusters + 1)?);
        let pool_config = zsmalloc::Config::with_capacity_pages(config.pool_capacity_pages)
            .shards(shards)
            // Data of one process must not be readable in another's object.
            .zero_freed(true);
        let pool = Arc::new(Pool::new(SharedSource(source), pool_config)?);
        let blocks = Arc::new(BlockTier::new(config.checksums(), Arc::clone(&pool)));
        let tiers = tiers_in_memory(&config, &pool, &blocks, wrap);
        Ok(Self {
            allocator: SlotAllocator::new(Arc::clone(&table)),
            table,
            overflow: OverflowCounts::new(),
            pool,
            outside: [TierKind::File, TierKind::Remote],
            tiers,
            blocks,
            blocks_in_background: config.blocks,
            blocks_for_room: config.blocks_for_room,
            migrator_wanted: AtomicUsize::new(0),
            loads_waiting: AtomicUsize::new(0),
            block_saving: config.block_saving.max(1),
            counters: Counters::new(shards),
            groups: Groups::new(shards),
            grace: Grace::new(shards),
            migrator: Mutex::default(),
        })
    }
}

/// The tiers of a space, by [`TierKind::index`].
type Tiers = [Option<Box<dyn Tier>>; TierKind::ALL.len()];

/// Makes the tiers that hold pages in memory, each passed through `wrap`.
fn tiers_in_memory<S: PageSource + 'static>(
    config: &SwapConfig,
    pool: &Arc<Pool<SharedSource<S>>>,
    blocks: &Arc<BlockTier<SharedSource<S>>>,
    mut wrap: impl FnMut(Box<dyn Tier>) -> Box<dyn Tier>,
) -> Tiers {
    let checksums = config.checksums();
    let compressed =
        |kind, codec: Codec| CompressedTier::new(kind, codec, checksums, Arc::clone(pool));
    let zstd = Codec::Zstd {
        level: config.recompress_level,
    };
    let mut tiers = [const { None }; TierKind::ALL.len()];
    for tier in [
        Box::new(SameFilledTier) as Box<dyn Tier>,
        Box::new(Arc::clone(blocks)),
        Box::new(compressed(TierKind::Compressed, config.algorithm.into())),
        Box::new(UncompressedTier::new(checksums, Arc::clone(pool))),
        Box::new(compressed(TierKind::Recompressed, zstd)),
    ] {
        let tier = wrap(tier);
        let index = tier.kind().index();
        tiers[index] = Some(tier);
    }
    tiers
}

/// Whether a read may wait for other machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// For one try.
    OneTry,
    /// As long as the tier does.
    Full,
    /// Not at all: pages on other machines are refused.
    LocalOnly,
}

impl Patience {
    /// The same for a caller that holds what others wait for.
    pub(crate) fn without_waiting(self) -> Patience {
        match self {
            Patience::Full | Patience::OneTry => Patience::OneTry,
            Patience::LocalOnly => Patience::LocalOnly,
        }
    }
}

impl<S: PageSource> SwapSpace<S> {
    /// Adds a tier for pages to be moved to, such as a file, before the space is shared.
    ///
    /// # Errors
    ///
    /// If the space has a tier of this kind.
    pub fn add_tier(&mut self, tier: Box<dyn Tier>) -> Result<(), NewSwapSpaceError> {
        let place = &mut self.tiers[tier.kind().index()];
        if place.is_some() {
            return Err(NewSwapSpaceError::Config(
                "the space has a tier of this kind",
            ));
        }
        *place = Some(tier);
        Ok(())
    }

    /// Offers pages that leave memory to the store on other machines before the file, before the
    /// space is shared.
    pub fn prefer_remote(&mut self) {
        self.outside = [TierKind::Remote, TierKind::File];
    }

    pub(crate) fn has(&self, kind: TierKind) -> bool {
        self.tiers[kind.index()].is_some()
    }

    /// The tiers outside of memory that this space has, in order.
    pub(crate) fn targets_outside(&self) -> Vec<TierKind> {
        let has = |kind: &TierKind| self.has(*kind);
        self.outside.into_iter().filter(has).collect()
    }

    /// The root group, which [`store`](Self::store) charges.
    pub fn root_group(&self) -> &Group {
        self.groups.root()
    }

    /// Makes a child of `parent`.
    pub fn new_group(&self, parent: &Group) -> Group {
        self.groups.add(parent)
    }

    /// Ends a group that stores no more. Slots of it that are still in use, pages shared by a fork,
    /// move to its parent. No effect on the root.
    pub fn end_group(&self, group: &Group) {
        self.groups.remove(group, |parent| {
            self.allocator.let_go_of(group, false);
            let _looked_at = self.allocator.hand_over(group.id(), parent.id());
        });
    }

    pub(crate) fn tier(&self, kind: TierKind) -> &dyn Tier {
        match &self.tiers[kind.index()] {
            Some(tier) => &**tier,
            None => panic!("a swap entry names the {kind} tier, which this space lacks"),
        }
    }

    /// Copies the page in `slot` to `out`. The slot is unchanged, except for its age.
    ///
    /// # Errors
    ///
    /// If the page cannot be read now, or the data is not what was stored. The contents of `out`
    /// are unspecified then.
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn load(&self, slot: Slot, out: &mut Page, scratch: &mut Scratch) -> Result<(), LoadError> {
        self.load_with(slot, out, scratch, Patience::Full)
    }

    /// The same, unless the page is on other machines, where a thread must not wait for a network: that
    /// is a [`LoadError::Tier`] of the remote tier.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn load_near(
        &self,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.load_with(slot, out, scratch, Patience::LocalOnly)
    }

    /// The same as [`load`](Self::load), but a page on other machines is asked for once, which takes at most a call to
    /// the store, or none if it was [fetched](Self::prefetch).
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn load_once(
        &self,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        self.load_with(slot, out, scratch, Patience::OneTry)
    }

    fn load_with(
        &self,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
        patience: Patience,
    ) -> Result<(), LoadError> {
        let mut found = self.read(slot, out, scratch, patience);
        if let Err(LoadError::Corrupt { .. }) = found {
            // The page may be moving between two tiers that both use its annex word.
            found = self.read_beside_moves(slot, out, scratch, patience);
        }
        match found {
            Ok(entry) => {
                self.table.entry(slot).mark_used(entry);
                self.counters.loaded();
                Ok(())
            }
            Err(error) => {
                self.counters.load_failed();
                Err(error)
            }
        }
    }

    /// Copies the page in `slot` to `out` and returns the entry it was found by.
    pub(crate) fn read(
        &self,
        slot: Slot,
        out: &mut Page,
        scratch: &mut Scratch,
        patience: Patience,
    ) -> Result<Entry, LoadError> {
        let cell = self.table.entry(slot);
        loop {
            let reading = (self.grace.enter(thread_number()), self.pool.pin());
            let entry = cell.load();
            let Some(position) = entry.position() else {
                wrong_entry(slot, entry, "loading its page")
            };
            let stored = Stored::new(slot, position.location, self.table.annex(slot));
            let tier = self.tier(position.tier);
            if patience == Patience::LocalOnly && tier.may_wait() {
                return Err(LoadError::Tier {
                    slot,
                    tier: position.tier,
                    reason: "it is on other machines",
                });
            }
            // What is freed meanwhile is not mistaken for other data: see `Tier::may_wait`.
            let reading = (!tier.may_wait()).then_some(reading);
            let loaded = match patience {
                Patience::Full | Patience::LocalOnly => tier.load(stored, out, scratch),
                Patience::OneTry => tier.load_now(stored, out, scratch),
            };
            drop(reading);
            match loaded {
                Ok(()) => return Ok(entry),
                // The page was moved, and its annex word may have changed before its entry.
                Err(_) if cell.load().position() != Some(position) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Begins to load pages that are about to be [loaded](Self::load) one after the other: fetches
    /// those that a tier has to wait for together. The caller holds a count of each.
    pub fn prefetch(&self, slots: impl Iterator<Item = Slot>) {
        let Some(tier) = &self.tiers[TierKind::Remote.index()] else {
            return;
        };
        let remote = |slot| match self.look_up(slot)? {
            (TierKind::Remote, location) => Some(location),
            _ => None,
        };
        let locations: Vec<_> = slots.filter_map(remote).collect();
        if locations.len() > 1 {
            // Outside of read-side critical sections: see `Tier::may_wait`.
            tier.prefetch(&locations);
        }
    }

    /// Whether a load of the page in `slot` may wait for other machines. May be outdated at once.
    #[inline]
    pub fn may_wait(&self, slot: Slot) -> bool {
        matches!(self.look_up(slot), Some((TierKind::Remote, _)))
    }

    /// Whether the page in `slot` is in a block though it was loaded since the last [scan](Self::scan): it is
    /// loaded faster if it is stored anew. May be outdated at once.
    #[inline]
    pub fn is_hot_in_block(&self, slot: Slot) -> bool {
        let entry = self.table.entry(slot).load();
        let tier = entry.position().map(|position| position.tier);
        tier == Some(TierKind::Block) && entry.age() == 0
    }

    /// The tier and location of the page in `slot`; `None` if the slot holds no page. Takes no
    /// lock, and may be outdated at once: use [`load`](Self::load) to read data.
    #[inline]
    pub fn look_up(&self, slot: Slot) -> Option<(TierKind, Location)> {
        let position = self.table.entry(slot).load().position()?;
        Some((position.tier, position.location))
    }

    /// Bytes of storage of the page in `slot`; `None` if the slot holds no page. May be outdated at
    /// once.
    pub fn stored_bytes(&self, slot: Slot) -> Option<u64> {
        let (tier, location) = self.look_up(slot)?;
        Some(self.tier(tier).bytes(location))
    }

    /// Adds a count to `slot` for another owner of the page.
    ///
    /// # Errors
    ///
    /// If there is no memory for a count above 30.
    ///
    /// # Panics
    ///
    /// If the slot holds no page.
    pub fn duplicate(&self, slot: Slot) -> Result<(), CountError> {
        self.table.entry(slot).duplicate(slot, &self.overflow)
    }

    /// The count of `slot`; 0 if it holds no page. May be outdated at once.
    pub fn count(&self, slot: Slot) -> u64 {
        let cell = self.table.entry(slot);
        loop {
            if !cell.is_overflown() {
                return cell.inline_count();
            }
            if let Some(count) = self.overflow.get(slot) {
                return count;
            }
        }
    }

    /// Statistics of the space. Sums a few counters of each shard; takes no lock.
    pub fn usage(&self) -> Usage {
        Usage {
            pool_bytes: self.pool_bytes(),
            metadata_bytes: self.metadata_bytes(),
            table_bytes: self.table_bytes(),
            dead_bytes: self.dead_bytes(),
            ..self.counters.usage()
        }
    }

    /// Resident bytes of the pool. Loads one counter.
    pub fn pool_bytes(&self) -> u64 {
        self.pool.resident_bytes() as u64
    }

    /// Bytes of swap tables and of the records of the space, its tiers and the pool. Loads a few counters.
    pub fn metadata_bytes(&self) -> u64 {
        let heap =
            self.overflow.heap_bytes() + self.counters.heap_bytes() + self.pool.metadata_bytes();
        let lists = self.allocator.heap_bytes() + self.blocks.heap_bytes();
        let tiers = self.tiers.iter().flatten();
        let records: u64 = tiers.map(|tier| tier.metadata_bytes()).sum();
        self.table_bytes() + lists + heap as u64 + records
    }

    /// Bytes of swap tables, annexes and cluster records: mostly 8 for each slot. Loads one
    /// counter.
    pub fn table_bytes(&self) -> u64 {
        self.allocator.resident_pages() * PAGE_SIZE as u64
    }

    /// Bytes of the pool that freed pages take in blocks with others that are in use. A block is taken
    /// apart by a [scan](Self::scan) when half of its pages are free.
    pub fn dead_bytes(&self) -> u64 {
        self.blocks.dead_bytes()
    }

    /// The number of pages in a tier.
    pub fn pages_in(&self, tier: TierKind) -> u64 {
        self.counters.pages_in(tier)
    }

    /// Asks `limit` before the pool grows by a huge page from now on.
    ///
    /// # Panics
    ///
    /// If the space has such a limit.
    pub fn limit_huge_pages(&self, limit: Box<dyn HugePageLimit>) {
        self.pool.limit_huge_pages(limit);
    }

    /// Returns what is retained for later stores to the kernel: empty clusters and free runs of the
    /// pool.
    pub fn trim(&self) {
        for group in self.groups.read().iter() {
            self.allocator.let_go_of(group, true);
        }
        self.pool.trim();
    }

    /// Returns free parts of the pool's huge pages to the kernel where they are more than a small
    /// part of the pool; [`SwapSpace::pool_bytes`] counts huge pages whole.
    pub fn trim_spare(&self) {
        self.pool.trim_spare();
    }
}

impl<S: PageSource> fmt::Debug for SwapSpace<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapSpace")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
