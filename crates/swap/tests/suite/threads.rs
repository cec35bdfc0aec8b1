//! Many threads on one space.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use memfold_testing::Random;

use crate::common::{MemoryFile, assert_empty, config, space_with_file};
use memfold_swap::{
    PAGE_SIZE, Page, ScanPolicy, Scratch, Slot, SwapConfig, SwapSpace, TierKind, fill,
};
use zsmalloc::HeapSource;

const RUN: Duration = Duration::from_secs(3);

fn space() -> SwapSpace<HeapSource> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 15,
        shards: 4,
        ..config()
    };
    space_with_file(config, MemoryFile::default().tier(256 << 20))
}

/// The page that `seed` stands for; its first word is `seed`, unless it repeats another.
fn page_of(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let noise = match seed % 8 {
        0 => {
            fill(&mut page, seed);
            return page;
        }
        1 => PAGE_SIZE,
        _ => 1600,
    };
    let mut random = Random::new(seed);
    for chunk in page[..noise].as_chunks_mut::<8>().0 {
        *chunk = random.next_word().to_le_bytes();
    }
    page[..8].copy_from_slice(&seed.to_le_bytes());
    page
}

fn check(space: &SwapSpace<HeapSource>, slot: Slot, seed: u64, scratch: &mut Scratch) {
    let mut out = [0; PAGE_SIZE];
    space.load(slot, &mut out, scratch).unwrap();
    assert!(out == page_of(seed), "wrong page from {slot:?}");
}

/// Recompresses, writes to a file, brings back and compacts all the time.
fn keep_moving(space: &SwapSpace<HeapSource>, end: Instant) {
    let mut scratch = Scratch::new();
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: Some(1),
    };
    let (mut moved, mut back, mut packed, mut in_file) = (0, 0, 0, 0);
    while Instant::now() < end {
        for _ in 0..3 {
            moved += space.scan(policy, 1 << 16, &mut scratch).moved;
        }
        in_file += space.usage().file_pages;
        packed += space.compact(|| true).objects_moved;
        for tier in [TierKind::File, TierKind::Recompressed, TierKind::Block] {
            let report = space.evacuate(tier, &mut scratch, || true);
            assert_eq!((report.store_error, report.failed), (None, 0));
            back += report.moved;
        }
    }
    let work = (moved, back, packed, in_file);
    assert!(
        moved > 100 && back > 100 && packed > 0 && in_file > 100,
        "{work:?}"
    );
}

/// Each thread stores, checks and releases its own pages, and hands some to the others with a
/// count of their own, as a fork does.
#[test]
fn pages_are_right_while_all_threads_work() {
    let space = space();
    let passed: Mutex<Vec<(Slot, u64)>> = Mutex::default();
    let end = Instant::now() + RUN;
    let work = |thread: u64| {
        let mut random = Random::new(thread);
        let mut scratch = Scratch::new();
        let mut own: Vec<(Slot, u64)> = Vec::new();
        while Instant::now() < end {
            match random.below(10) {
                0..4 if own.len() < 3000 => {
                    let seed = random.next_word();
                    let slot = space.store(&page_of(seed), &mut scratch).unwrap();
                    own.push((slot, seed));
                }
                4..6 if !own.is_empty() => {
                    let (slot, seed) = own[random.below(own.len())];
                    check(&space, slot, seed, &mut scratch);
                }
                6 if !own.is_empty() => {
                    let (slot, seed) = own[random.below(own.len())];
                    space.duplicate(slot).unwrap();
                    passed.lock().unwrap().push((slot, seed));
                }
                7 => {
                    let taken = passed.lock().unwrap().pop();
                    if let Some((slot, seed)) = taken {
                        check(&space, slot, seed, &mut scratch);
                        own.push((slot, seed));
                    }
                }
                8 if !own.is_empty() => {
                    let index = random.below(own.len());
                    space.release(own.swap_remove(index).0);
                }
                _ if random.below(40) == 0 => {
                    let count = random.below(own.len() + 1);
                    let slots: Vec<_> = own.drain(..count).map(|(slot, _)| slot).collect();
                    space.release_bulk(&slots);
                }
                _ => {}
            }
        }
        for (slot, seed) in &own {
            check(&space, *slot, *seed, &mut scratch);
        }
        space.release_bulk(&own.into_iter().map(|(slot, _)| slot).collect::<Vec<_>>());
    };
    let (space_of_mover, work) = (&space, &work);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || work(thread));
        }
        scope.spawn(|| keep_moving(space_of_mover, end));
    });
    for (slot, _) in passed.into_inner().unwrap() {
        space.release(slot);
    }
    assert_empty(&space);
}

/// Threads count one slot up and down across the border of what an entry holds.
#[test]
fn large_counts_are_exact() {
    let space = space();
    let slot = space.store(&page_of(3), &mut Scratch::new()).unwrap();
    for _ in 0..250 {
        space.duplicate(slot).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let space = &space;
            scope.spawn(move || {
                let mut random = Random::new(thread);
                let mut held = 0;
                for _ in 0..100_000 {
                    if held > 0 && random.below(2) == 0 {
                        space.release(slot);
                        held -= 1;
                    } else if held < 5 {
                        space.duplicate(slot).unwrap();
                        held += 1;
                    }
                }
                for _ in 0..held {
                    space.release(slot);
                }
            });
        }
    });
    assert_eq!(space.count(slot), 251);
    space.release_bulk(&[slot; 251]);
    assert_empty(&space);
}

/// Walks through clusters that come and go.
fn keep_moving_some(space: &SwapSpace<HeapSource>, end: Instant) {
    let mut scratch = Scratch::new();
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: None,
    };
    while Instant::now() < end {
        space.scan(policy, 1 << 16, &mut scratch);
    }
}

/// Clusters come and go all the time while others read and count.
#[test]
fn clusters_are_given_back_under_readers() {
    let space = space();
    let mut scratch = Scratch::new();
    let kept: Vec<_> = (0..2000_u64)
        .map(|seed| (space.store(&page_of(seed), &mut scratch).unwrap(), seed))
        .collect();
    let done = AtomicBool::new(false);
    let end = Instant::now() + RUN;
    std::thread::scope(|scope| {
        scope.spawn(|| keep_moving_some(&space, end));
        for _ in 0..2 {
            scope.spawn(|| {
                let mut scratch = Scratch::new();
                while !done.load(Ordering::Relaxed) {
                    for &(slot, seed) in &kept {
                        space.duplicate(slot).unwrap();
                        check(&space, slot, seed, &mut scratch);
                        space.release(slot);
                    }
                }
            });
        }
        for thread in 0..2 {
            let (space, done) = (&space, &done);
            scope.spawn(move || {
                let mut scratch = Scratch::new();
                let end = Instant::now() + RUN;
                let mut slots = Vec::new();
                while Instant::now() < end {
                    for word in 0..1500_u64 {
                        let mut page = [0; PAGE_SIZE];
                        fill(&mut page, word * 8 + thread);
                        slots.push(space.store(&page, &mut scratch).unwrap());
                    }
                    space.release_bulk(&slots);
                    slots.clear();
                }
                done.store(true, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(space.usage().slots_in_use as usize, kept.len());
}
