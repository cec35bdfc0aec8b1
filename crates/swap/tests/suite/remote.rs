//! The remote tier with a store that fails in every way: pages stay until they are acknowledged, and
//! nothing but the right page ever comes back.

mod trouble;

use std::{
    cell::Cell,
    collections::HashMap,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::common::{MemoryFile, assert_empty, config, noise, text};
use memfold_swap::{
    Batch, BatchId, Corruption, FileTier, LoadError, ModelFault, ModelStore, PAGE_SIZE, Page,
    Place, Placed, RemoteBackend, RemoteConfig, RemoteError, RemoteTier, Removal, ScanPolicy,
    Scratch, Slot, StoreError, SwapConfig, SwapSpace, Tier, TierKey, TierKind,
};
use proptest::prelude::*;
use zsmalloc::HeapSource;

const TIME_TO_LIVE: Duration = Duration::from_secs(3600);
/// No store is paused for longer.
const LONG: Duration = Duration::from_secs(10);

struct World {
    space: SwapSpace<HeapSource>,
    store: ModelStore,
    tier: Arc<RemoteTier>,
    /// The contents of the file.
    file: MemoryFile,
    /// Where copies are kept, if any are.
    copies: Option<Arc<FileTier>>,
    scratch: Scratch,
}

/// What else the space has beside the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum File {
    None,
    /// A file of this many bytes, for what fits.
    First(u64),
    Copies,
}

fn mixed(seed: u64) -> Page {
    if seed.is_multiple_of(5) {
        noise(seed)
    } else {
        text(seed)
    }
}

impl World {
    fn new(file: File) -> Self {
        let store = ModelStore::new(Some(TIME_TO_LIVE));
        let mut remote = RemoteConfig::default();
        remote.patience = Duration::from_secs(60);
        remote.renew_every = TIME_TO_LIVE / 4;
        remote.time_to_live = TIME_TO_LIVE;
        let mut space = SwapSpace::new(HeapSource::new(), config()).unwrap();
        let (mut copies, key) = (None, TierKey::new([9; 32]));
        let memory = MemoryFile::default();
        match file {
            File::None => {}
            File::First(bytes) => {
                let file = memory.tier(bytes);
                space.add_tier(Box::new(file)).unwrap();
            }
            File::Copies => {
                let file = memory.tier(64 << 20);
                space.add_tier(Box::new(file.clone())).unwrap();
                space.prefer_remote();
                copies = Some(file);
            }
        }
        let tier = RemoteTier::new(Box::new(store.clone()), &key, remote);
        let tier = Arc::new(tier);
        let kept = copies.clone();
        kept.into_iter().for_each(|file| tier.keep_copies_in(file));
        space.add_tier(Box::new(tier.clone())).unwrap();
        Self {
            space,
            store,
            tier,
            file: memory,
            copies,
            scratch: Scratch::new(),
        }
    }

    fn fill(&mut self, pages: std::ops::Range<u64>) -> Vec<(Slot, u64)> {
        let mut store = |seed| self.space.store(&mixed(seed), &mut self.scratch).unwrap();
        pages.map(|seed| (store(seed), seed)).collect()
    }

    fn write_back(&mut self) -> u64 {
        let policy = ScanPolicy {
            recompress: None,
            write_back: Some(1),
        };
        let mut moved = 0;
        for _ in 0..2 {
            moved += self.space.scan(policy, usize::MAX, &mut self.scratch).moved;
        }
        moved
    }

    fn load(&mut self, slot: Slot) -> Result<Page, LoadError> {
        let mut page = [0xcc; PAGE_SIZE];
        let loaded = self.space.load(slot, &mut page, &mut self.scratch);
        loaded.map(|()| page)
    }

    #[track_caller]
    fn assert_all_right(&mut self, stored: &[(Slot, u64)]) {
        for &(slot, seed) in stored {
            assert!(self.load(slot).unwrap() == mixed(seed), "from {slot:?}");
        }
    }

    #[track_caller]
    fn end(&mut self, stored: &[(Slot, u64)]) {
        let slots: Vec<_> = stored.iter().map(|(slot, _)| *slot).collect();
        self.space.release_bulk(&slots);
        assert_empty(&self.space);
        self.store.disarm();
        assert!(self.tier.maintain(&|| false));
        assert_eq!(self.store.records(), 0);
    }
}

#[test]
fn pages_go_to_the_store_and_come_back() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..2000);
    assert_eq!(world.write_back(), 1999);
    let usage = world.space.usage();
    assert_eq!((usage.remote_pages, usage.sent_total), (1999, 1999));
    assert_eq!(world.store.records(), 1999);
    world.space.trim();
    assert_eq!(world.space.usage().pool_bytes, 0);
    world.assert_all_right(&stored);
    world
        .space
        .prefetch(stored.iter().take(100).map(|one| one.0));
    world.assert_all_right(&stored);
    let report = world
        .space
        .evacuate(TierKind::Remote, &mut Scratch::new(), || true);
    assert_eq!((report.moved, report.finished), (1999, true));
    world.assert_all_right(&stored);
    world.write_back();
    world.end(&stored);
}

#[test]
fn what_is_not_acknowledged_stays() {
    for fault in [
        ModelFault::PutLost,
        ModelFault::PutUnacknowledged,
        ModelFault::Full,
        ModelFault::TooFewReplicas,
    ] {
        let mut world = World::new(File::None);
        let stored = world.fill(1..400);
        world.store.arm(fault, u64::MAX);
        assert_eq!(world.write_back(), 0);
        assert_eq!(world.space.usage().remote_pages, 0);
        assert!(world.tier.usage().store_failures > 0 && world.tier.is_paused());
        // A store in trouble is left alone for a while.
        let happened = world.store.happened();
        world.write_back();
        assert_eq!(world.store.happened(), happened);
        world.assert_all_right(&stored);
        world.store.disarm();
        world.store.pass(LONG);
        assert!(world.tier.maintain(&|| false));
        assert_eq!(world.store.records(), 0, "abandoned batches are removed");
        assert_eq!(world.write_back(), 399);
        assert_eq!(world.tier.usage().trouble, None);
        world.assert_all_right(&stored);
        world.end(&stored);
    }
}

#[test]
fn what_no_longer_fits_the_file_goes_to_the_store() {
    let mut world = World::new(File::First(1 << 20));
    let stored = world.fill(1..2000);
    assert_eq!(world.write_back(), 1999);
    let usage = world.space.usage();
    assert!(usage.file_pages > 100 && usage.remote_pages > 100);
    assert_eq!(usage.file_pages + usage.remote_pages, 1999);
    world.assert_all_right(&stored);
    world.end(&stored);
}

#[test]
fn a_load_waits_for_a_bounded_time() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..100);
    world.write_back();
    world.store.arm(ModelFault::GetUnavailable, 20);
    world.assert_all_right(&stored);
    assert_eq!(world.tier.usage().retries, 20);
    world.store.arm(ModelFault::GetUnavailable, u64::MAX);
    let error = world.load(stored[0].0).unwrap_err();
    assert!(matches!(error, LoadError::Tier { .. }), "{error}");
    assert_eq!(world.tier.usage().waiting, 0);
    let (before, tries) = (world.store.now(), world.tier.usage().retries);
    let once = world
        .space
        .load_once(stored[0].0, &mut [0; PAGE_SIZE], &mut world.scratch);
    assert!(matches!(once, Err(LoadError::Tier { .. })), "{once:?}");
    assert_eq!(
        (world.store.now(), world.tier.usage().retries),
        (before, tries)
    );
    world.store.disarm();
    // Nothing was lost by that.
    world.assert_all_right(&stored);
    world.end(&stored);
}

#[test]
fn no_other_data_is_taken_for_a_page() {
    for fault in [ModelFault::GetForged, ModelFault::GetReplayed] {
        let mut world = World::new(File::None);
        let stored = world.fill(1..200);
        world.write_back();
        // One answer may be mixed up.
        world.store.arm(fault, 1);
        world.assert_all_right(&stored[1..]);
        world.store.arm(fault, u64::MAX);
        for &(slot, _) in &stored[1..] {
            let error = world.load(slot).unwrap_err();
            assert!(matches!(error, LoadError::Corrupt { .. }), "{error}");
        }
        assert_eq!(world.tier.usage().load_failures, 2 * 198);
        world.end(&stored);
    }
}

#[test]
fn what_the_store_lost_is_never_replaced() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..200);
    world.write_back();
    world.store.flush();
    for &(slot, _) in &stored {
        let error = world.load(slot).unwrap_err();
        let LoadError::Corrupt { what, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(what, Corruption::Lost);
    }
    for _ in 0..2 {
        world.store.pass(TIME_TO_LIVE / 4);
        world.tier.maintain(&|| false);
        assert_eq!(world.tier.usage().lost_pages, 199);
    }
    world.end(&stored);
}

#[test]
fn pages_live_for_as_long_as_they_are_renewed() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..200);
    world.write_back();
    for _ in 0..20 {
        world.store.arm(ModelFault::RenewLost, 1);
        world.store.pass(TIME_TO_LIVE / 4);
        assert!(!world.tier.maintain(&|| false));
        assert!(world.tier.maintain(&|| false));
    }
    world.assert_all_right(&stored);
    // The run was killed.
    world.store.pass(TIME_TO_LIVE);
    assert_eq!(world.store.records(), 0);
    world.end(&stored);
}

#[test]
fn copies_in_the_file_outlive_the_store() {
    let mut world = World::new(File::Copies);
    let stored = world.fill(1..500);
    assert_eq!(world.write_back(), 499);
    assert_eq!(world.space.usage().remote_pages, 499);
    world.store.arm(ModelFault::GetUnavailable, 10);
    world.assert_all_right(&stored);
    world.store.disarm();
    world.tier.maintain(&|| false);
    world.store.flush();
    world.assert_all_right(&stored);
    // What the store does not take goes to the file alone.
    world.store.arm(ModelFault::Full, u64::MAX);
    let more = world.fill(1000..1100);
    world.write_back();
    assert_eq!(world.space.usage().file_pages, 100);
    world.assert_all_right(&more);
    let all: Vec<_> = stored.into_iter().chain(more).collect();
    world.end(&all);
}

#[test]
fn after_a_swapoff_pages_go_to_the_store_without_copies() {
    let mut world = World::new(File::Copies);
    let mut stored = world.fill(1..3);
    assert_eq!(world.write_back(), 2);
    let file = world.copies.clone().expect("a file");
    let used = file.usage().used_bytes;
    file.set_closed(true);
    stored.extend(world.fill(3..9));
    assert_eq!(world.write_back(), 6);
    assert_eq!(world.space.usage().remote_pages, 8);
    assert_eq!(file.usage().used_bytes, used);
    world.assert_all_right(&stored);
    world.end(&stored);
}

#[test]
fn a_store_is_waited_for_where_the_copy_cannot_be_read() {
    let mut world = World::new(File::Copies);
    let stored = world.fill(1..3);
    assert_eq!(world.write_back(), 2);
    // A read error, and a damaged record.
    world.file.bad_reads.store(2, Ordering::Relaxed);
    world.store.arm(ModelFault::GetUnavailable, 3);
    world.assert_all_right(&stored[..1]);
    world.file.contents.lock().unwrap().fill(0);
    world.store.arm(ModelFault::GetUnavailable, 3);
    world.assert_all_right(&stored[1..]);
    assert_eq!(world.tier.usage().load_failures, 0);
    // A caller that may not wait is told what failed first.
    world.store.arm(ModelFault::GetUnavailable, 1);
    let mut page = [0; PAGE_SIZE];
    let slot = stored[0].0;
    let loaded = world.space.load_once(slot, &mut page, &mut world.scratch);
    let tier = TierKind::Remote;
    let is_expected = matches!(loaded, Err(LoadError::Tier { tier: found, .. }) if found == tier);
    assert!(is_expected, "{loaded:?}");
    world.end(&stored);
}

#[test]
fn a_clean_end_removes_everything() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..500);
    world.write_back();
    world.store.arm(ModelFault::RemoveLost, 3);
    assert!(world.tier.clear(Duration::from_secs(10)));
    assert_eq!(world.store.records(), 0);
    let error = world.space.store(&text(1), &mut world.scratch).map(drop);
    assert_eq!(error, Ok(()));
    assert!(matches!(
        world.load(stored[0].0),
        Err(LoadError::Corrupt { .. })
    ));
    // Slots may be released later.
    let slots: Vec<_> = stored.iter().map(|one| one.0).collect();
    world.space.release_bulk(&slots);
}

/// With copies, and few pages left of each batch.
#[test]
fn records_of_batches_are_metadata() {
    let mut world = World::new(File::Copies);
    let before = world.space.usage().metadata_bytes;
    let stored = world.fill(1..64 * 100);
    world.write_back();
    let with_copies = world.space.usage().metadata_bytes - before;
    assert!(with_copies > 16 * stored.len() as u64, "{with_copies}");
    let (kept, gone): (Vec<_>, Vec<_>) = stored.into_iter().partition(|(_, seed)| seed % 64 == 0);
    let gone: Vec<_> = gone.iter().map(|(slot, _)| *slot).collect();
    let whole = world.space.usage().metadata_bytes;
    world.space.release_bulk(&gone);
    let freed = whole - world.space.usage().metadata_bytes;
    assert!(freed > 12 * gone.len() as u64, "{freed}");
    world.assert_all_right(&kept);
    world.end(&kept);
}

/// Such as one whose user may not use `UNLINK`.
#[test]
fn what_a_store_refuses_to_remove_is_forgotten_once_it_has_expired() {
    let store = ModelStore::new(Some(TIME_TO_LIVE));
    let mut config = RemoteConfig::default();
    config.time_to_live = TIME_TO_LIVE;
    config.renew_every = TIME_TO_LIVE / 4;
    let tier = RemoteTier::new(Box::new(store.clone()), &TierKey::new([9; 32]), config);
    store.arm(ModelFault::RemoveLost, u64::MAX);
    let mut scratch = Scratch::new();
    let mut bytes = Vec::new();
    for _ in 0..60 {
        // A batch each.
        let placed = (0..200).map(|_| tier.store(Slot::from_raw(1), &text(1), &mut scratch));
        let location = |placed| match placed {
            Ok(Placed::WithAnnex(location, _)) => location,
            other => panic!("{other:?}"),
        };
        let mut locations: Vec<_> = placed.map(location).collect();
        tier.free(&mut locations);
        assert!(!tier.maintain(&|| false));
        store.pass(TIME_TO_LIVE / 5);
        bytes.push(tier.metadata_bytes());
    }
    assert!(bytes[59] <= bytes[19], "{bytes:?}");
    store.disarm();
    assert!(tier.maintain(&|| false));
}

/// A laptop that sleeps now and then: the store's clock goes on.
#[test]
fn pages_do_not_expire_while_this_machine_is_suspended() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..200);
    world.write_back();
    for _ in 0..10 {
        world.store.suspend(TIME_TO_LIVE / 3);
        world.store.pass(Duration::from_secs(1));
        assert!(world.tier.maintain(&|| false));
    }
    world.assert_all_right(&stored);
    world.end(&stored);
}

/// A store whose acknowledgements wait until they are let go.
#[derive(Clone)]
struct Held {
    store: ModelStore,
    has_arrived: Arc<Barrier>,
    may_answer: Arc<Barrier>,
    /// Something waits for what is under way.
    is_awaited: Arc<AtomicBool>,
}

impl RemoteBackend for Held {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        let outcomes = self.store.put(batches);
        self.has_arrived.wait();
        self.may_answer.wait();
        outcomes
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        self.store.get(places)
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        self.store.remove(removals)
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        self.store.renew(batches)
    }

    fn now(&self) -> Duration {
        // Only a test that fails waits for long.
        Duration::ZERO
    }

    fn sleep(&self, duration: Duration) {
        self.is_awaited.store(true, Ordering::Relaxed);
        std::thread::sleep(duration);
    }
}

#[test]
fn a_clean_end_waits_for_what_is_under_way() {
    let barrier = || Arc::new(Barrier::new(2));
    let backend = Held {
        store: ModelStore::new(None),
        has_arrived: barrier(),
        may_answer: barrier(),
        is_awaited: Arc::default(),
    };
    let key = TierKey::new([9; 32]);
    let tier = RemoteTier::new(Box::new(backend.clone()), &key, RemoteConfig::default());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slot = Slot::from_raw(7);
            let stored = tier.store(slot, &text(1), &mut Scratch::new());
            assert!(stored.is_err(), "the store was cleared");
        });
        backend.has_arrived.wait();
        let clear = scope.spawn(|| tier.clear(Duration::from_secs(10)));
        while !backend.is_awaited.load(Ordering::Relaxed) && !clear.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let has_waited = !clear.is_finished();
        backend.may_answer.wait();
        assert!(has_waited);
        assert!(clear.join().expect("it ends"));
        assert_eq!(backend.store.records(), 0);
    });
}

/// A store that takes a second to remove something.
#[derive(Clone)]
struct Slow(ModelStore);

impl RemoteBackend for Slow {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        self.0.put(batches)
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        self.0.get(places)
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        self.0.pass(Duration::from_secs(1));
        self.0.remove(removals)
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        self.0.renew(batches)
    }

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep(&self, duration: Duration) {
        self.0.sleep(duration);
    }
}

#[test]
fn removals_hold_up_neither_renewals_nor_the_end() {
    let backend = Slow(ModelStore::new(Some(Duration::from_secs(10))));
    let mut config = RemoteConfig::default();
    config.renew_every = Duration::from_millis(2500);
    config.time_to_live = Duration::from_secs(10);
    let tier = RemoteTier::new(Box::new(backend.clone()), &TierKey::new([9; 32]), config);
    let mut scratch = Scratch::new();
    let mut store = |number| {
        let placed = tier.store(Slot::from_raw(number), &text(1), &mut scratch);
        let Ok(Placed::WithAnnex(location, _)) = placed else {
            panic!("{placed:?}");
        };
        location
    };
    // A batch each.
    let mut freed: Vec<_> = (1..10_000).map(&mut store).collect();
    store(0);
    tier.free(&mut freed);
    let calls = Cell::new(0);
    let is_over = || calls.replace(calls.get() + 1) == 3;
    assert!(!tier.maintain(&is_over));
    assert!(backend.0.records() > 5_000, "all were removed first");
    assert!(tier.maintain(&|| false));
    assert!(backend.now() > Duration::from_secs(15));
    assert_eq!(backend.0.records(), 1, "the page in use has expired");
    assert_eq!(tier.usage().lost_pages, 0);
}

#[test]
fn a_full_pool_stores_new_pages_remotely() {
    let store = ModelStore::new(None);
    let key = TierKey::new([9; 32]);
    let remote = RemoteTier::new(Box::new(store.clone()), &key, RemoteConfig::default());
    let config = SwapConfig {
        pool_capacity_pages: 64,
        ..config()
    };
    let mut space = SwapSpace::new(HeapSource::new(), config).unwrap();
    space.add_tier(Box::new(remote)).unwrap();
    let mut scratch = Scratch::new();
    let stored: Vec<_> = (1..3000)
        .map(|seed| space.store(&noise(seed), &mut scratch).unwrap())
        .collect();
    assert!(store.records() > 1000, "{}", store.records());
    store.arm(ModelFault::Full, u64::MAX);
    let error = space.store(&noise(3000), &mut scratch).unwrap_err();
    assert!(matches!(
        error,
        StoreError::Tier { .. } | StoreError::Pool(_)
    ));
    space.release_bulk(&stored);
}

#[derive(Debug, Clone)]
enum Operation {
    Store(u64),
    Load(usize),
    Prefetch(usize),
    Release(usize),
    WriteBack,
    Evacuate(TierKind),
    Arm(ModelFault, u64),
    Pass(u64),
    Maintain,
    Evict(usize),
}

const FAULTS: [ModelFault; 10] = [
    ModelFault::PutLost,
    ModelFault::PutUnacknowledged,
    ModelFault::Full,
    ModelFault::TooFewReplicas,
    ModelFault::GetUnavailable,
    ModelFault::GetForged,
    ModelFault::GetReplayed,
    ModelFault::RemoveLost,
    ModelFault::RemoveUnacknowledged,
    ModelFault::RenewLost,
];

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (1..400_u64).prop_map(Operation::Store),
        6 => any::<usize>().prop_map(Operation::Load),
        2 => any::<usize>().prop_map(Operation::Prefetch),
        4 => any::<usize>().prop_map(Operation::Release),
        4 => Just(Operation::WriteBack),
        1 => prop::sample::select(&[TierKind::Remote, TierKind::File][..])
            .prop_map(Operation::Evacuate),
        4 => (prop::sample::select(&FAULTS[..]), 1..6_u64)
            .prop_map(|(fault, times)| Operation::Arm(fault, times)),
        3 => (1..600_u64).prop_map(Operation::Pass),
        4 => Just(Operation::Maintain),
        1 => any::<usize>().prop_map(Operation::Evict),
    ]
}

/// A world and what each slot must hold.
struct Pair {
    world: World,
    held: Vec<(Slot, u64)>,
    /// Whether the store has lost a batch, or may have lost some for lack of a renewal.
    lost: bool,
    file: File,
}

impl Pair {
    fn apply(&mut self, operation: &Operation) {
        let count = self.held.len();
        let pick = |which: &usize| (count > 0).then(|| which % count);
        match operation {
            Operation::Store(pages) => {
                let first = self.held.last().map_or(1, |(_, seed)| seed + 1);
                let more = self.world.fill(first..first + pages);
                self.held.extend(more);
            }
            Operation::Load(which) => {
                if let Some(which) = pick(which) {
                    self.check(which);
                }
            }
            Operation::Prefetch(from) => {
                if let Some(from) = pick(from) {
                    let slots = self.held[from..].iter().take(16).map(|one| one.0);
                    self.world.space.prefetch(slots);
                }
            }
            Operation::Release(which) => {
                if let Some(which) = pick(which) {
                    let (slot, _) = self.held.swap_remove(which);
                    self.world.space.release(slot);
                }
            }
            Operation::WriteBack => {
                self.world.write_back();
            }
            Operation::Evacuate(tier) => {
                let scratch = &mut Scratch::new();
                self.world.space.evacuate(*tier, scratch, || true);
            }
            Operation::Arm(fault, times) => self.world.store.arm(*fault, *times),
            Operation::Pass(seconds) => {
                self.world.store.pass(Duration::from_secs(*seconds));
                // As the thread of the command does, often enough.
                while !self.world.tier.maintain(&|| false) {}
            }
            Operation::Maintain => {
                self.world.tier.maintain(&|| false);
            }
            Operation::Evict(which) => self.lost |= self.world.store.evict(*which),
        }
    }

    /// A page is right, or refused for a reason.
    fn check(&mut self, which: usize) {
        let (slot, seed) = self.held[which];
        let before = self.world.store.happened();
        match self.world.load(slot) {
            Ok(page) => assert!(page == mixed(seed), "wrong page from {slot:?}"),
            Err(error) => {
                assert_ne!(self.file, File::Copies, "{error}");
                let lost = matches!(
                    error,
                    LoadError::Corrupt {
                        what: Corruption::Lost,
                        ..
                    }
                );
                let is_explained = lost && self.lost || self.world.store.happened() > before;
                assert!(is_explained, "{error}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_space_with_a_failing_store_returns_what_was_stored(
        file in prop::sample::select(&[File::None, File::First(2 << 20), File::Copies][..]),
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        let mut pair = Pair { world: World::new(file), held: Vec::new(), lost: false, file };
        for operation in &operations {
            pair.apply(operation);
        }
        pair.world.store.disarm();
        for which in 0..pair.held.len() {
            pair.check(which);
        }
        let seen: HashMap<_, _> = pair.held.iter().copied().collect();
        prop_assert_eq!(seen.len(), pair.held.len());
        let held = std::mem::take(&mut pair.held);
        pair.world.end(&held);
    }
}
