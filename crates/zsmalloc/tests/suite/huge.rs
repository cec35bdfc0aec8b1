//! Memory in huge pages: filled at once, given back whole, or split where much of it is free.

use std::{
    sync::{Arc, Barrier, atomic::Ordering},
    thread,
    time::Duration,
};

use crate::common::{TestSource, check_stats, contents};
use memfold_testing::Random;
use zsmalloc::{Config, Drainer, HandleTable, ObjectWord, PAGE_SIZE, Pool};

const HUGE: usize = 64;

fn config(spare_part: usize) -> Config {
    Config::with_capacity_pages(1 << 14)
        .shards(2)
        .retained_pages(0)
        .deferred_bytes(0)
        .spare_part(spare_part)
}

fn pool(spare_part: usize) -> Pool<TestSource> {
    Pool::new(TestSource::with_huge_pages(HUGE), config(spare_part)).unwrap()
}

/// Stores whole pages, the `n`th with contents of its own.
fn store_pages(pool: &Pool<TestSource>, count: u64) -> Vec<(u64, ObjectWord)> {
    let store = |n| (n, pool.store(&[&contents(n, PAGE_SIZE)]).unwrap());
    (0..count).map(store).collect()
}

fn check(pool: &Pool<TestSource>, stored: &[(u64, ObjectWord)]) {
    for &(n, word) in stored {
        pool.read_slot(word, |slot| assert!(slot == contents(n, PAGE_SIZE)));
    }
    check_stats(pool, stored.iter().map(|_| PAGE_SIZE));
    let committed = pool.source().committed_pages.load(Ordering::Relaxed) as usize;
    assert_eq!(committed, pool.stats().resident_pages);
}

fn free(pool: &Pool<TestSource>, stored: &[(u64, ObjectWord)]) {
    let mut words: Vec<_> = stored.iter().map(|&(_, word)| word).collect();
    pool.free_bulk(&mut words);
}

/// Frees all but those whose number is a multiple of `step`, and returns these.
fn free_but_every(
    pool: &Pool<TestSource>,
    stored: Vec<(u64, ObjectWord)>,
    step: u64,
) -> Vec<(u64, ObjectWord)> {
    let (kept, freed): (Vec<_>, Vec<_>) = stored.into_iter().partition(|(n, _)| n % step == 0);
    free(pool, &freed);
    kept
}

fn free_all(pool: &Pool<TestSource>, stored: &[(u64, ObjectWord)]) {
    free(pool, stored);
    pool.trim();
    assert_eq!(pool.stats().resident_pages, 0);
    assert_eq!(pool.stats().huge_pages + pool.stats().spare_pages, 0);
    assert_eq!(pool.source().committed_pages.load(Ordering::Relaxed), 0);
}

#[test]
fn what_is_freed_during_a_split_goes_after_it() {
    let pool = pool(8);
    let kept = free_but_every(&pool, store_pages(&pool, 4000), 16);
    assert!(pool.stats().spare_pages > 0);
    let barrier = Arc::new(Barrier::new(2));
    *pool.source().meet_at_split.lock().unwrap() = Some(barrier.clone());
    thread::scope(|scope| {
        scope.spawn(|| pool.trim());
        barrier.wait();
        free(&pool, &kept);
        // It cannot give back what lies where the other one splits.
        pool.trim();
        let resident = pool.stats().resident_pages;
        barrier.wait();
        assert!(resident > 0);
    });
    assert_eq!(pool.stats().resident_pages, 0);
}

#[test]
fn a_small_pool_has_none_and_a_large_one_mostly() {
    let pool = pool(8);
    let few = store_pages(&pool, 3 * HUGE as u64);
    assert_eq!(pool.stats().huge_pages, 0);
    let many = store_pages(&pool, 4000);
    check(
        &pool,
        &many[..0]
            .iter()
            .chain(&few)
            .chain(&many)
            .copied()
            .collect::<Vec<_>>(),
    );
    let stats = pool.stats();
    assert!(stats.huge_pages > 3000, "{stats}");
    // What is spare is part of the last one, and the pool may have that much.
    assert!(
        stats.spare_pages <= HUGE && stats.huge_splits == 0,
        "{stats}"
    );
    free(&pool, &few);
    free_all(&pool, &many);
    assert_eq!(pool.stats().huge_splits, 0, "whole ones need no splitting");
}

#[test]
fn a_refilled_pool_is_filled_by_huge_pages_again() {
    let pool = pool(8);
    for _ in 0..3 {
        let stored = store_pages(&pool, 10_000);
        check(&pool, &stored);
        assert!(pool.stats().huge_pages > 8000, "{}", pool.stats());
        free_all(&pool, &stored);
    }
}

#[test]
fn where_much_is_free_huge_pages_are_split() {
    let pool = pool(8);
    let stored = store_pages(&pool, 6000);
    let kept = free_but_every(&pool, stored, 16);
    let before = pool.stats();
    assert!(
        before.spare_pages > 4000 && before.huge_splits == 0,
        "{before}"
    );
    let given_back = pool.trim();
    let after = pool.stats();
    assert_eq!(before.resident_pages - given_back, after.resident_pages);
    assert!(
        after.huge_splits > 0 && after.resident_pages < kept.len() * 5 / 4,
        "{after}"
    );
    assert!(after.spare_pages <= after.resident_pages / 4, "{after}");
    check(&pool, &kept);
    free_all(&pool, &kept);
}

/// Zspages of many lengths lie across them.
#[test]
fn those_of_few_pages_serve_a_small_pool() {
    let source = TestSource::with_huge_pages(16);
    let pool = Pool::new(source, config(8)).unwrap();
    let mut random = Random::new(7);
    let stored: Vec<_> = (0..3000_u64)
        .map(|n| {
            let size = 1 + random.below(PAGE_SIZE);
            (n, size, pool.store(&[&contents(n, size)]).unwrap())
        })
        .collect();
    let check = |stored: &[(u64, usize, ObjectWord)]| {
        for &(n, size, word) in stored {
            pool.read_slot(word, |slot| assert!(slot[..size] == contents(n, size)));
        }
        check_stats(&pool, stored.iter().map(|&(_, size, _)| size));
        let committed = pool.source().committed_pages.load(Ordering::Relaxed) as usize;
        assert_eq!(committed, pool.stats().resident_pages);
    };
    check(&stored);
    let full = pool.stats();
    assert!(full.huge_pages > full.resident_pages / 2, "{full}");
    assert!(full.spare_pages < full.resident_pages / 7, "{full}");
    let (kept, freed): (Vec<_>, Vec<_>) = stored.into_iter().partition(|(n, ..)| n % 5 == 0);
    pool.free_bulk(&mut freed.iter().map(|&(_, _, word)| word).collect::<Vec<_>>());
    pool.trim();
    check(&kept);
    let sparse = pool.stats();
    assert!(
        sparse.resident_pages == sparse.pages() && sparse.huge_splits > 0,
        "{sparse}"
    );
    pool.free_bulk(&mut kept.iter().map(|&(_, _, word)| word).collect::<Vec<_>>());
    pool.trim();
    assert_eq!(pool.stats().resident_pages, 0);
}

/// New zspages take free pages of huge ones before anything else.
#[test]
fn spare_pages_are_used_first() {
    let pool = pool(8);
    let stored = store_pages(&pool, 6000);
    let kept = free_but_every(&pool, stored, 2);
    let before = pool.stats();
    assert!(before.spare_pages > 2000, "{before}");
    // From another thread too, which is of another shard.
    let more = thread::scope(|scope| {
        let store = || scope.spawn(|| store_pages(&pool, 1000)).join().unwrap();
        [store(), store()].concat()
    });
    assert_eq!(pool.stats().resident_pages, before.resident_pages);
    check(&pool, &[&kept[..], &more].concat());
    free_all(&pool, &[&kept[..], &more].concat());
}

#[test]
fn what_cannot_be_given_back_is_kept_and_tried_again() {
    let pool = pool(8);
    let stored = store_pages(&pool, 3000);
    let mut kept = free_but_every(&pool, stored, 16);
    for successes in 0..8 {
        pool.source().discards_left.set(successes);
        pool.trim();
        check(&pool, &kept);
        pool.source().discards_left.set(-1);
        // The failed ones are used again meanwhile.
        kept.extend(store_pages(&pool, 20));
        check(&pool, &kept);
    }
    assert!(pool.stats().discard_failures > 0);
    free_all(&pool, &kept);
}

#[test]
fn without_huge_pages_to_be_had_small_ones_do() {
    let pool = pool(8);
    pool.source().huge_left.set(3);
    let stored = store_pages(&pool, 4000);
    assert_eq!(pool.stats().huge_pages, 3 * HUGE);
    check(&pool, &stored);
    free_all(&pool, &stored);
}

/// Without a trim, but with further frees.
#[test]
fn much_spare_memory_does_not_last() {
    let pool = pool(8);
    let mut stored = store_pages(&pool, 6000);
    let freed: Vec<_> = stored.extract_if(.., |(n, _)| *n % 16 > 1).collect();
    pool.free_bulk(&mut freed.iter().map(|&(_, word)| word).collect::<Vec<_>>());
    let burst = pool.stats();
    assert!(burst.spare_pages > burst.resident_pages / 2, "{burst}");
    thread::sleep(Duration::from_millis(60));
    while pool.stats().spare_pages > burst.spare_pages / 8 {
        let (_, word) = stored.pop().expect("a few dozen frees are enough");
        pool.free(word);
    }
    check(&pool, &stored);
    free_all(&pool, &stored);
}

/// Stores, frees in all ways, compaction, a drainer and trims at once.
#[test]
fn threads_fill_and_split_together() {
    let config = config(2).deferred_bytes(1 << 20);
    let table = HandleTable::new(TestSource::with_huge_pages(16), config.clone()).unwrap();
    let other = Arc::new(Pool::new(TestSource::with_huge_pages(16), config).unwrap());
    let drainer = Drainer::spawn(other.clone()).unwrap();
    thread::scope(|scope| {
        for seed in 1..4 {
            let (table, other) = (&table, &other);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut handles = Vec::new();
                let mut words = Vec::new();
                for round in 0..40 {
                    for _ in 0..100 {
                        let size = 1 + random.below(PAGE_SIZE - 16);
                        let bytes = contents(size as u64, size);
                        handles.push((table.store(&bytes).unwrap(), size));
                        words.push((other.store(&[&bytes]).unwrap(), size));
                    }
                    let goal = if round % 8 == 7 {
                        10
                    } else {
                        words.len() * 2 / 3
                    };
                    while words.len() > goal {
                        let (handle, size) = handles.swap_remove(random.below(handles.len()));
                        let whole = |bytes: &[u8]| bytes == contents(size as u64, size);
                        assert!(table.read(handle, whole).unwrap());
                        table.free(handle).unwrap();
                        let (word, size) = words.swap_remove(random.below(words.len()));
                        other.read_slot(word, |slot| {
                            assert!(slot[..size] == contents(size as u64, size));
                        });
                        other.free_deferred(word);
                    }
                    table.pool().trim();
                }
                handles
                    .into_iter()
                    .for_each(|(handle, _)| table.free(handle).unwrap());
                words.into_iter().for_each(|(word, _)| other.free(word));
            });
        }
        scope.spawn(|| {
            for _ in 0..50 {
                table.compact(|| true);
            }
        });
    });
    drop(drainer);
    for pool in [table.pool(), &other] {
        pool.trim();
        check_stats(pool, std::iter::empty());
        assert_eq!(pool.stats().resident_pages, 0);
        assert_eq!(pool.source().committed_pages.load(Ordering::Relaxed), 0);
    }
}
