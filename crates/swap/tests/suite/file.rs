//! The file tier: pages survive there, and nothing but the right page ever comes back.

use std::io;
use std::sync::{Arc, Mutex, atomic::Ordering::Relaxed};

use crate::common::{MemoryFile, assert_empty, config, noise, space_with_file, text};
use memfold_swap::{
    Corruption, FileBackend, FileTier, LoadError, MigrateReport, PAGE_SIZE, Page, ScanPolicy,
    Scratch, Slot, StoreError, SwapConfig, SwapSpace, Tier, TierKey, TierKind,
};
use zsmalloc::HeapSource;

const FILE: u64 = 64 << 20;

fn space(tier: &Arc<FileTier>) -> SwapSpace<HeapSource> {
    space_with_file(config(), Arc::clone(tier))
}

fn mixed(seed: u64) -> Page {
    if seed.is_multiple_of(5) {
        noise(seed)
    } else {
        text(seed)
    }
}

fn store(space: &SwapSpace<HeapSource>, pages: std::ops::Range<u64>) -> Vec<(Slot, u64)> {
    let mut scratch = Scratch::new();
    pages
        .map(|seed| (space.store(&mixed(seed), &mut scratch).unwrap(), seed))
        .collect()
}

/// Scans until all that is cold has gone where it goes.
fn write_back(space: &SwapSpace<HeapSource>) -> MigrateReport {
    let policy = ScanPolicy {
        recompress: None,
        write_back: Some(1),
    };
    let mut scratch = Scratch::new();
    space.scan(policy, usize::MAX, &mut scratch);
    space.scan(policy, usize::MAX, &mut scratch)
}

fn load(space: &SwapSpace<HeapSource>, slot: Slot) -> Result<Page, LoadError> {
    let mut page = [0xcc; PAGE_SIZE];
    space
        .load(slot, &mut page, &mut Scratch::new())
        .map(|()| page)
}

#[track_caller]
fn assert_all_right(space: &SwapSpace<HeapSource>, stored: &[(Slot, u64)]) {
    for &(slot, seed) in stored {
        assert!(
            load(space, slot).unwrap() == mixed(seed),
            "wrong page from {slot:?}"
        );
    }
}

#[test]
fn pages_go_to_the_file_and_come_back() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let space = space(&tier);
    let stored = store(&space, 1..2000);
    let before = space.usage();
    assert_eq!(write_back(&space).moved, 1999);
    assert!(file.writes.load(Relaxed) < 50, "one write for a batch");
    let usage = space.usage();
    assert_eq!(
        (usage.file_pages, usage.file_bytes),
        (1999, tier.usage().used_bytes)
    );
    space.trim();
    assert_eq!(space.usage().pool_bytes, 0);
    assert_all_right(&space, &stored);
    assert!(
        file.reads.load(Relaxed) < 200,
        "{} reads for 1999 pages",
        file.reads.load(Relaxed)
    );

    // Swapoff: back to the pool, while the owners know nothing.
    let report = space.evacuate(TierKind::File, &mut Scratch::new(), || true);
    assert_eq!((report.moved, report.finished), (1999, true));
    assert_eq!(space.usage().stored_bytes, before.stored_bytes);
    assert_eq!(tier.usage().used_bytes, 0);
    assert_all_right(&space, &stored);

    write_back(&space);
    space.release_bulk(&stored.iter().map(|(slot, _)| *slot).collect::<Vec<_>>());
    assert_eq!(tier.usage().used_bytes, 0);
    assert_empty(&space);
}

/// A file that does something at its first write.
struct DuringWrite {
    file: MemoryFile,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

#[derive(Clone)]
struct Shared(Arc<DuringWrite>);

impl FileBackend for Shared {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.file.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let act = self.0.act.lock().unwrap().take();
        act.into_iter().for_each(|act| act());
        self.0.file.write_at(offset, data)
    }
}

/// A page that repeats one word, which is kept in its slot's annex, like what the file needs to know of
/// a page. It is read without a check.
#[test]
fn a_page_that_takes_the_place_of_one_to_be_written_is_not_written() {
    let backend = Shared(Arc::new(DuringWrite {
        file: MemoryFile::default(),
        act: Mutex::default(),
    }));
    let key = TierKey::new([7; 32]);
    let tier = Arc::new(FileTier::new(Box::new(backend.clone()), FILE, &key, 1).unwrap());
    let space = Arc::new(space(&tier));
    let mut stored = store(&space, 1..700);
    // All are to be written at the second scan; while the first of them are, most of the same cluster
    // are freed.
    let gone: Vec<_> = stored.drain(100..500).collect();
    let slots: Vec<Slot> = gone.iter().map(|(slot, _)| *slot).collect();
    let repeated = Arc::new(Mutex::new(Vec::new()));
    let page = [0.1_f64.to_ne_bytes(); PAGE_SIZE / 8].concat();
    let page: Page = page.try_into().unwrap();
    *backend.0.act.lock().unwrap() = Some(Box::new({
        let (space, repeated, slots) = (Arc::downgrade(&space), repeated.clone(), slots.clone());
        move || {
            let space = space.upgrade().unwrap();
            space.release_bulk(&slots);
            let mut scratch = Scratch::new();
            let again = (0..2000).map(|_| space.store(&page, &mut scratch).unwrap());
            repeated.lock().unwrap().extend(again);
        }
    }));
    write_back(&space);
    let repeated = repeated.lock().unwrap();
    let reused = repeated.iter().filter(|slot| slots.contains(slot)).count();
    assert!(reused > 30, "only {reused} slots were used again");
    for slot in repeated.iter() {
        assert_eq!(space.look_up(*slot).unwrap().0, TierKind::SameFilled);
        assert!(
            load(&space, *slot).unwrap() == page,
            "wrong page from {slot:?}"
        );
    }
    assert_all_right(&space, &stored);
}

#[test]
fn nothing_readable_is_written() {
    let file = MemoryFile::default();
    let space = space(&file.tier(FILE));
    let stored = store(&space, 1..100);
    assert_eq!(write_back(&space).moved, 99);
    let contents = file.contents.lock().unwrap();
    for &(_, seed) in &stored {
        let page = mixed(seed);
        let known = &page[..16];
        assert!(!contents.windows(known.len()).any(|window| window == known));
    }
}

#[test]
fn a_full_disk_loses_nothing() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let space = space(&tier);
    let stored = store(&space, 1..2000);
    file.disk.store(500_000, Relaxed);
    let report = write_back(&space);
    assert!(report.moved > 100 && report.failed > 0, "{report:?}");
    assert!(matches!(
        report.store_error,
        Some(StoreError::Tier {
            tier: TierKind::File,
            ..
        })
    ));
    assert!(
        (1..20).contains(&tier.usage().write_errors),
        "it is not asked again and again"
    );
    assert_eq!(space.usage().file_bytes, tier.usage().used_bytes);
    assert_all_right(&space, &stored);
    // Once there is room again, it goes on.
    file.disk.store(0, Relaxed);
    for _ in 0..20 {
        write_back(&space);
    }
    assert_eq!(space.usage().file_pages, 1999);
    assert_all_right(&space, &stored);
}

#[test]
fn an_error_that_passes_is_not_held_against_the_file() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let mut scratch = Scratch::new();
    let mut store = |seed| tier.store(Slot::from_raw(1), &text(seed), &mut scratch);
    for seed in 1..=10 {
        file.disk.store(1, Relaxed);
        assert!(store(seed).is_err());
        file.disk.store(0, Relaxed);
        assert!(store(seed).is_err(), "the disk is given a rest");
        assert!(store(seed).is_ok(), "error {seed}");
    }
    assert_eq!(tier.usage().write_errors, 10);
}

#[test]
fn a_disk_that_fails_for_long_is_used_soon_after_it() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let mut scratch = Scratch::new();
    let mut store = || tier.store(Slot::from_raw(1), &text(1), &mut scratch);
    file.disk.store(1, Relaxed);
    for _ in 0..1000 {
        assert!(store().is_err());
    }
    let errors = tier.usage().write_errors;
    assert!(errors < 40, "it is written all the time: {errors} errors");
    file.disk.store(0, Relaxed);
    let refused = (0..1000).take_while(|_| store().is_err()).count();
    assert!(refused <= 32, "{refused} batches were refused");
}

#[test]
fn a_full_file_loses_nothing_and_is_filled_to_the_end() {
    let file = MemoryFile::default();
    let tier = file.tier(1 << 20);
    let space = space(&tier);
    let stored = store(&space, 1..2000);
    write_back(&space);
    let usage = tier.usage();
    assert!(
        usage.size_bytes - usage.used_bytes < 3 * PAGE_SIZE as u64,
        "{usage:?}"
    );
    assert_eq!(usage.write_errors, 0);
    assert_all_right(&space, &stored);
}

#[test]
fn a_page_that_cannot_be_read_now_is_not_lost() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let space = space(&tier);
    let stored = store(&space, 1..10);
    write_back(&space);
    file.bad_reads.store(1, Relaxed);
    let failed = load(&space, stored[3].0);
    assert!(
        matches!(
            failed,
            Err(LoadError::Tier {
                tier: TierKind::File,
                ..
            })
        ),
        "{failed:?}"
    );
    assert_eq!(tier.usage().read_errors, 1);
    // Swapoff leaves what it cannot read, too.
    file.bad_reads.store(2, Relaxed);
    let report = space.evacuate(TierKind::File, &mut Scratch::new(), || true);
    assert!(
        report.failed > 0 && report.failed + report.moved == 9,
        "{report:?}"
    );
    assert_all_right(&space, &stored);
}

/// Damages the file, and checks that each page is refused or right.
fn assert_no_wrong_bytes(damage: impl Fn(&mut Vec<u8>), refused: std::ops::RangeInclusive<usize>) {
    let file = MemoryFile::default();
    let space = space(&file.tier(FILE));
    let stored = store(&space, 1..300);
    assert_eq!(write_back(&space).moved, 299);
    damage(&mut file.contents.lock().unwrap());
    let mut count = 0;
    for &(slot, seed) in &stored {
        match load(&space, slot) {
            Ok(page) => assert!(page == mixed(seed), "wrong page from {slot:?}"),
            Err(LoadError::Corrupt { what, .. }) => {
                assert_eq!(what, Corruption::Forged);
                count += 1;
            }
            Err(LoadError::Tier { .. }) => count += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused.contains(&count), "{count} pages were refused");
}

#[test]
fn a_truncated_file_is_noticed() {
    assert_no_wrong_bytes(|contents| contents.truncate(contents.len() / 2), 100..=200);
    assert_no_wrong_bytes(Vec::clear, 299..=299);
}

#[test]
fn a_damaged_file_is_noticed() {
    assert_no_wrong_bytes(|contents| contents[70_000] ^= 1, 0..=1);
    let sprinkle = |contents: &mut Vec<u8>| {
        contents
            .iter_mut()
            .step_by(1000)
            .for_each(|byte| *byte ^= 0x80);
    };
    assert_no_wrong_bytes(sprinkle, 250..=299);
    assert_no_wrong_bytes(|contents| contents.fill(0), 299..=299);
}

#[test]
fn pages_that_changed_places_are_noticed() {
    let rotate = |contents: &mut Vec<u8>| contents.rotate_left(128 * 20);
    assert_no_wrong_bytes(rotate, 299..=299);
}

#[test]
fn a_file_of_another_key_or_of_an_earlier_write_is_refused() {
    let file = MemoryFile::default();
    let old = {
        let space = space(&file.tier(FILE));
        store(&space, 1..50);
        write_back(&space);
        file.contents.lock().unwrap().clone()
    };
    // The same pages in the same places under another key.
    let key = TierKey::new([8; 32]);
    let tier = Arc::new(FileTier::new(Box::new(file.clone()), FILE, &key, 1).unwrap());
    let space = space(&tier);
    let stored = store(&space, 1..50);
    write_back(&space);
    let new = file.contents.lock().unwrap().clone();
    assert_eq!(old.len(), new.len());
    file.contents.lock().unwrap().clone_from(&old);
    for &(slot, _) in &stored {
        assert!(matches!(load(&space, slot), Err(LoadError::Corrupt { .. })));
    }
    // The same slots in the same places under the same key, but from before.
    file.contents.lock().unwrap().clone_from(&new);
    space.evacuate(TierKind::File, &mut Scratch::new(), || true);
    write_back(&space);
    let written_again = file.contents.lock().unwrap().clone();
    assert!(written_again.len() >= new.len());
    file.contents.lock().unwrap()[..new.len()].copy_from_slice(&new);
    for &(slot, seed) in &stored {
        if let Ok(page) = load(&space, slot) {
            assert!(page == mixed(seed), "wrong page from {slot:?}");
        }
    }
}

#[test]
fn what_the_pool_has_no_room_for_goes_to_the_file() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let config = SwapConfig {
        pool_capacity_pages: 1024,
        ..config()
    };
    let space = space_with_file(config, tier);
    let stored = store(&space, 1..4000);
    assert!(space.usage().file_pages > 500, "{:?}", space.usage());
    assert_all_right(&space, &stored);
}

/// The disk has less room than the file may have, as is usual: the file is sparse.
#[test]
fn room_that_is_freed_on_a_full_disk_is_used_again() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let space = space(&tier);
    file.disk.store(500_000, Relaxed);
    let first = store(&space, 1..1000);
    let before = write_back(&space);
    assert!(before.moved > 100 && before.failed > 0, "{before:?}");
    let slots: Vec<_> = first.iter().map(|(slot, _)| *slot).collect();
    space.release_bulk(&slots);
    assert_eq!(tier.usage().used_bytes, 0);

    let mut scratch = Scratch::new();
    let mut outcomes = Vec::new();
    let page = text(1);
    let pages = vec![(Slot::from_raw(1), &page); 64];
    let mut batches = 0;
    while outcomes.iter().all(Result::is_err) {
        outcomes.clear();
        tier.store_batch(&pages, &mut scratch, &mut outcomes);
        batches += 1;
        assert!(batches <= 70, "{:?}", tier.usage());
    }
}

/// Pages that come and go take the room of those that went before, not more of the file.
#[test]
fn a_file_grows_no_larger_than_what_is_in_it_needs() {
    let file = MemoryFile::default();
    let tier = file.tier(FILE);
    let space = space(&tier);
    for round in 0..20 {
        let stored = store(&space, round * 500..(round + 1) * 500);
        write_back(&space);
        assert_eq!(space.usage().file_pages, 500);
        let slots: Vec<_> = stored.iter().map(|(slot, _)| *slot).collect();
        space.release_bulk(&slots);
    }
    let length = file.contents.lock().unwrap().len();
    assert!(length < 1000 * PAGE_SIZE, "{length}");
}
