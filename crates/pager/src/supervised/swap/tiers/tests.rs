use super::*;
use crate::Limit;
use crate::options::Floor;
use crate::pool_memory::MappedSource;
use crate::supervised::group::Outlets;
use memfold_swap::{
    FileBackend, ModelStore, Page, RemoteConfig, RemoteTier, Slot, SwapConfig, SwapSpace,
};
use memfold_sys::PAGE_SIZE;
use memfold_testing::Random;
use std::cell::Cell;
use std::io;
use std::sync::atomic::AtomicBool;

/// A file that takes what is written to it.
struct Sink;

impl FileBackend for Sink {
    fn read_at(&self, _offset: u64, _buffer: &mut [u8]) -> io::Result<()> {
        Err(ErrorKind::UnexpectedEof.into())
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// A disk that always fails, until it is repaired.
#[derive(Clone, Default)]
struct Broken(Arc<AtomicBool>);

impl FileBackend for Broken {
    fn read_at(&self, _offset: u64, _buffer: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("EIO"))
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        let is_repaired = self.0.load(Ordering::Relaxed);
        is_repaired
            .then_some(())
            .ok_or_else(|| io::Error::other("EIO"))
    }
}

/// A group with a limit of 16 MiB and a swap file.
fn group(backend: impl FileBackend + 'static, bytes: u64) -> Group {
    group_with(backend, bytes, None)
}

/// The same with a store.
fn group_with(
    backend: impl FileBackend + 'static,
    bytes: u64,
    remote: Option<Arc<RemoteTier>>,
) -> Group {
    let file = FileTier::new(Box::new(backend), bytes, &TierKey::new([7; 32]), FILE_LEVEL);
    let file = Arc::new(file.unwrap());
    let config = SwapConfig {
        pool_capacity_pages: 1 << 16,
        max_slots: 1 << 16,
        shards: 1,
        ..SwapConfig::default()
    };
    let mut swap = SwapSpace::new(MappedSource::default(), config).unwrap();
    swap.add_tier(Box::new(file.clone())).unwrap();
    if let Some(remote) = &remote {
        swap.add_tier(Box::new(remote.clone())).unwrap();
    }
    let limit = Limit {
        total_bytes: Some(16 << 20),
        resident_bytes: None,
    };
    let outlets = Outlets {
        file: Some(file),
        remote,
    };
    Group::new((limit, Floor::default()), swap, outlets)
}

/// Stores incompressible pages until the pool has so many bytes. Returns their slots.
fn fill(group: &Group, pool_bytes: u64, scratch: &mut Scratch) -> Vec<Slot> {
    let (mut random, mut slots) = (Random::new(7), Vec::new());
    while group.resources.swap.pool_bytes() < pool_bytes {
        let mut page: Page = [0; PAGE_SIZE];
        page.fill_with(|| random.next_word() as u8);
        slots.push(group.resources.swap.store(&page, scratch).unwrap());
    }
    slots
}

/// Holds the limit until the file takes nothing more.
fn hold(group: &Group, scratch: &mut Scratch) {
    let out = || group.resources.swap.usage().file_pages;
    loop {
        let before = out();
        group.file_paused_until.store(0, Ordering::Relaxed);
        group.hold_pool_limit(scratch, None);
        if out() == before {
            break;
        }
    }
    group.hold_pool_limit(scratch, None);
}

#[test]
fn a_full_file_is_no_outlet_until_pages_leave_it() {
    let group = group(Sink, (1 << 20) + 512);
    let mut scratch = Scratch::new();
    let slots = fill(&group, 12 << 20, &mut scratch);
    let pays = || group.compression.pays(|| Some(4096));
    group.hold_pool_limit(&mut scratch, None);
    hold(&group, &mut scratch);
    let usage = group.file.as_ref().unwrap().usage();
    assert!(usage.used_bytes > 1 << 19 && usage.used_bytes < usage.size_bytes);
    assert!(!pays());
    group.resources.swap.release_bulk(&slots);
    group.hold_pool_limit(&mut scratch, None);
    assert!(pays());
}

#[test]
fn a_file_that_fails_is_no_outlet_until_a_write_succeeds() {
    let disk = Broken::default();
    let group = group(disk.clone(), 64 << 20);
    let mut scratch = Scratch::new();
    let slots = fill(&group, 12 << 20, &mut scratch);
    let pays = || group.compression.pays(|| Some(4096));
    hold(&group, &mut scratch);
    assert!(!pays());
    // There is nothing to write back now, which would find that the disk works again.
    group.resources.swap.release_bulk(&slots);
    group.probe_file();
    assert!(group.file.as_ref().unwrap().is_failing());
    disk.0.store(true, Ordering::Relaxed);
    for _ in 0..100 {
        group.file_paused_until.store(0, Ordering::Relaxed);
        group.probe_file();
    }
    group.hold_pool_limit(&mut scratch, None);
    assert!(pays());
    let usage = group.file.as_ref().unwrap().usage();
    assert_eq!(usage.used_bytes, 0);
    assert!(usage.write_errors > 0);
}

/// A limit was lowered so far that much is to be written, and faults wait for the thread that writes.
#[test]
fn write_back_goes_on_for_as_long_as_it_may() {
    let group = group(Sink, 64 << 20);
    let mut scratch = Scratch::new();
    fill(&group, 20 << 20, &mut scratch);
    let swap = &group.resources.swap;
    let full = swap.pool_bytes();
    let steps = Cell::new(0);
    let two_steps = || steps.replace(steps.get() + 1) < 2;
    group.shrink_pool(8 << 20, &mut scratch, two_steps);
    let written = full - swap.pool_bytes();
    // A step goes to the end of a cluster, of 2 MiB.
    assert!((1..=4 << 20).contains(&written), "{written}");
    group.stopping.store(true, Ordering::Relaxed);
    group.hold_pool_limit(&mut scratch, None);
    assert_eq!(full - swap.pool_bytes(), written, "the group stops");
    group.stopping.store(false, Ordering::Relaxed);
    group.hold_pool_limit(&mut scratch, Some(Instant::now()));
    assert_eq!(full - swap.pool_bytes(), written, "the time is over");
    group.hold_pool_limit(&mut scratch, None);
    assert!(swap.pool_bytes() <= 8 << 20);
}

#[test]
fn pages_are_as_old_as_was_asked_for_before_they_move() {
    let seconds = Duration::from_secs;
    let plan = ScanPlan::new(Some(seconds(60)), Some(seconds(600)));
    assert_eq!(plan.period, Some(seconds(60)));
    assert_eq!(plan.policy.recompress, Some(1));
    assert_eq!(plan.policy.write_back, Some(10));
    for (recompress, write_back) in [(1, 3600), (3600, 1), (7, 50), (1, 1)] {
        let plan = ScanPlan::new(Some(seconds(recompress)), Some(seconds(write_back)));
        let period = plan.period.unwrap();
        for (after, age) in [
            (recompress, plan.policy.recompress),
            (write_back, plan.policy.write_back),
        ] {
            // A page of age n was looked at n times before, a period apart.
            let least = period * u32::from(age.unwrap());
            assert!(least >= seconds(after), "{after} s: {plan:?}");
            assert!(least < seconds(after) + 2 * period, "{after} s: {plan:?}");
        }
    }
    assert_eq!(ScanPlan::new(None, None).period, None);
    assert_eq!(
        ScanPlan::new(None, Some(seconds(5))).policy.recompress,
        None
    );
}

#[test]
fn the_pool_is_held_below_half_of_the_limit() {
    for limit in [16 << 20, 1 << 30, 1 << 40] {
        let share = PoolShare::of(limit);
        assert!(share.stop < share.start && share.start < share.hard);
        assert_eq!(share.hard, limit / 2);
        assert!(share.stop > limit / 3);
    }
}

#[test]
fn a_swapoff_that_fails_for_the_file_leaves_the_store_in_use() {
    let key = TierKey::new([9; 32]);
    let store = Box::new(ModelStore::new(None));
    let remote = Arc::new(RemoteTier::new(store, &key, RemoteConfig::default()));
    // What is in this file cannot be read.
    let group = group_with(Sink, 1 << 20, Some(remote.clone()));
    let mut scratch = Scratch::new();
    fill(&group, 12 << 20, &mut scratch);
    let pages = |kind| group.resources.swap.pages_in(kind);
    hold(&group, &mut scratch);
    assert!(pages(TierKind::File) > 0 && pages(TierKind::Remote) > 0);
    let refused = group.swap_off().unwrap_err();
    assert!(
        matches!(refused, SwapOffError::Unreadable { .. }),
        "{refused:?}"
    );
    assert!(!remote.is_closed());
    hold(&group, &mut scratch);
    assert!(pages(TierKind::Remote) > 0);
}
