//! Compaction, alone and beside everything else, through a handle table.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::common::{TestSource, check_stats, contents};
use memfold_testing::Random;
use zsmalloc::{
    Config, Drainer, Handle, HandleTable, HeapSource, ObjectWord, PAGE_SIZE, Pool, Relocate,
};

fn table(shards: usize) -> HandleTable<TestSource> {
    let config = Config::with_capacity_pages(1 << 16)
        .shards(shards)
        .retained_pages(0);
    HandleTable::new(TestSource::default(), config).unwrap()
}

fn check(table: &HandleTable<TestSource>, handle: Handle, seed: u64, size: usize) {
    table
        .read(handle, |bytes| {
            assert!(bytes == contents(seed, size), "wrong bytes");
        })
        .unwrap();
}

fn stored_pages_needed(table: &HandleTable<TestSource>) -> usize {
    let stats = table.pool().stats();
    let needed = stats.classes.iter().map(|class| {
        class.objects_used.div_ceil(class.objects_per_zspage) * class.pages_per_zspage
    });
    needed.sum()
}

#[test]
fn what_is_left_is_packed_and_unchanged() {
    for shards in [1, 4] {
        let table = table(shards);
        let mut random = Random::new(5);
        let store = |n: u64| {
            let size = 1 + n as usize * 613 % 4000;
            (table.store(&contents(n, size)).unwrap(), n, size)
        };
        // From several threads, so that all shards have some.
        let mut objects: Vec<(Handle, u64, usize)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4_u64)
                .map(|thread| {
                    scope.spawn(move || {
                        (thread * 1500..(thread + 1) * 1500)
                            .map(store)
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        objects.retain(|&(handle, ..)| {
            let keep = random.below(10) < 3;
            if !keep {
                table.free(handle).unwrap();
            }
            keep
        });
        let before = table.pool().stats().resident_pages;
        let report = table.compact(|| true);
        table.pool().trim();
        let after = table.pool().stats().resident_pages;
        assert!(report.objects_moved > 0 && report.objects_refused == 0);
        assert!(
            report.pages_released > 0 && after < before * 6 / 10,
            "{before} -> {after}"
        );
        assert_eq!(after, stored_pages_needed(&table));
        check_stats(table.pool(), objects.iter().map(|&(_, _, size)| size + 4));
        for (handle, seed, size) in objects {
            check(&table, handle, seed, size);
            table.free(handle).unwrap();
            assert!(table.read(handle, |_| ()).is_err() && table.free(handle).is_err());
        }
        table.pool().trim();
        assert_eq!(table.pool().resident_bytes(), 0);
        assert_eq!(
            table
                .pool()
                .source()
                .committed_pages
                .load(Ordering::Relaxed),
            0
        );
    }
}

/// Threads store, read and free their own objects while two compactors move them.
#[test]
fn objects_survive_compaction_beside_everything() {
    const THREADS: u64 = 4;
    let table = table(2);
    let stop = AtomicBool::new(false);
    let moved: usize = thread::scope(|scope| {
        let workers: Vec<_> = (1..=THREADS)
            .map(|number| {
                let table = &table;
                scope.spawn(move || work(table, number))
            })
            .collect();
        let compactors: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut moved = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let go_on = || !stop.load(Ordering::Relaxed);
                        moved += table.compact(go_on).objects_moved;
                    }
                    moved
                })
            })
            .collect();
        let results: Vec<_> = workers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        stop.store(true, Ordering::Relaxed);
        assert!(results.into_iter().all(|result| result.is_ok()));
        compactors
            .into_iter()
            .map(|compactor| compactor.join().unwrap())
            .sum()
    });
    assert!(moved > 0);
    table.pool().trim();
    assert_eq!(table.pool().stats().objects_used(), 0);
    assert_eq!(table.pool().resident_bytes(), 0);
}

fn work(table: &HandleTable<TestSource>, number: u64) {
    let mut random = Random::new(number);
    let mut own: Vec<(Handle, u64, usize)> = Vec::new();
    for step in 0..12_000 {
        // Waves, so that there is something to compact.
        let growing = step / 1000 % 2 == 0;
        if random.below(10) < if growing { 8 } else { 2 } {
            let (seed, size) = (
                random.next_word() >> 16,
                [100, 1000, 1800, 3000][random.below(4)],
            );
            own.push((table.store(&contents(seed, size)).unwrap(), seed, size));
        } else if !own.is_empty() {
            let (handle, seed, size) = own.swap_remove(random.below(own.len()));
            check(table, handle, seed, size);
            table.free(handle).unwrap();
        }
        if let Some(&(handle, seed, size)) = own.get(random.below(own.len().max(1))) {
            check(table, handle, seed, size);
        }
    }
    for (handle, seed, size) in own {
        check(table, handle, seed, size);
        table.free(handle).unwrap();
    }
}

struct Refuses;

impl Relocate for Refuses {
    fn relocate(&self, _: ObjectWord, _: ObjectWord, _: &[u8]) -> bool {
        false
    }
}

#[test]
fn an_owner_that_refuses_loses_nothing() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1 << 14)).unwrap();
    let words: Vec<ObjectWord> = (0..2000)
        .map(|n| pool.store(&[&contents(n, 1500)]).unwrap())
        .collect();
    words
        .iter()
        .skip(1)
        .step_by(2)
        .for_each(|&word| pool.free(word));
    let report = pool.compact(&Refuses, || true);
    assert!(report.objects_refused > 0);
    assert_eq!((report.objects_moved, report.pages_released), (0, 0));
    for (n, &word) in words.iter().enumerate().step_by(2) {
        pool.read_slot(word, |slot| {
            assert!(slot[..1500] == contents(n as u64, 1500));
        });
        pool.free(word);
    }
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
}

/// Replaces the words of objects that start with their number.
struct Words(Vec<Mutex<ObjectWord>>);

impl Relocate for Words {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let (number, _) = object.split_first_chunk().unwrap();
        let mut word = self.0[u64::from_le_bytes(*number) as usize].lock().unwrap();
        assert_eq!(std::mem::replace(&mut *word, new), old);
        true
    }
}

#[test]
fn what_waits_to_be_freed_is_not_moved() {
    let config = Config::with_capacity_pages(1 << 14).shards(1);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    let store = |n: u64| pool.store(&[&n.to_le_bytes(), &contents(n, 1492)]).unwrap();
    let owner = Words((0..3000).map(|n| Mutex::new(store(n))).collect());
    let freed = |number: &usize| !number.is_multiple_of(4);
    for number in (0..3000).filter(freed) {
        pool.free_deferred(*owner.0[number].lock().unwrap());
    }
    assert!(pool.deferred_bytes() > 0);
    let report = pool.compact(&owner, || true);
    assert_eq!(pool.deferred_bytes(), 0);
    assert_eq!(pool.stats().objects_used(), 750);
    // At most those that stay, of which some lie well.
    assert!((1..750).contains(&report.objects_moved), "{report:?}");
    assert!(report.pages_released > 0);
    for (number, word) in owner.0.iter().enumerate() {
        if !freed(&number) {
            pool.read_slot(*word.lock().unwrap(), |bytes| {
                assert!(bytes[8..1500] == contents(number as u64, 1492));
            });
        }
    }
}

/// Frees all objects and gives the memory back as soon as the first is to be moved.
struct FreesAll<'a> {
    pool: &'a Pool<HeapSource>,
    words: Mutex<Vec<ObjectWord>>,
}

impl Relocate for FreesAll<'_> {
    fn relocate(&self, _: ObjectWord, _: ObjectWord, _: &[u8]) -> bool {
        let words = std::mem::take(&mut *self.words.lock().unwrap());
        words.into_iter().for_each(|word| self.pool.free(word));
        self.pool.trim();
        false
    }
}

/// The last free and the trim come while a compactor holds zspages of its own: what it still has
/// then goes back when it is done, as no other thread returns it.
#[test]
fn memory_goes_back_that_was_freed_during_compaction() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1 << 14)).unwrap();
    let mut words: Vec<ObjectWord> = (0..200)
        .map(|n| pool.store(&[&contents(n, 1500)]).unwrap())
        .collect();
    let mut number = 0;
    words.retain(|&word| {
        number += 1;
        let keep = number % 2 == 0;
        if !keep {
            pool.free(word);
        }
        keep
    });
    let owner = FreesAll {
        pool: &pool,
        words: Mutex::new(words),
    };
    let report = pool.compact(&owner, || true);
    assert!(report.objects_refused > 0 && report.objects_moved == 0);
    assert_eq!(pool.stats().objects_used(), 0);
    assert_eq!(pool.resident_bytes(), 0);
}

#[test]
fn compaction_stops_when_asked() {
    let table = table(1);
    let handles: Vec<Handle> = (0..4000)
        .map(|n| table.store(&contents(n, 2000)).unwrap())
        .collect();
    handles
        .iter()
        .skip(1)
        .step_by(2)
        .for_each(|&handle| table.free(handle).unwrap());
    let mut asked = 0;
    let report = table.compact(|| {
        asked += 1;
        asked == 1
    });
    assert!(report.pages_released > 0);
    assert!(table.compact(|| true).pages_released > report.pages_released);
    assert_eq!(table.compact(|| false), zsmalloc::CompactReport::default());
}

#[test]
fn deferred_frees_are_bounded_and_done() {
    let config = Config::with_capacity_pages(1 << 14)
        .shards(1)
        .deferred_bytes(1 << 18);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    let words: Vec<ObjectWord> = (0..1000)
        .map(|n| pool.store(&[&contents(n, 2048)]).unwrap())
        .collect();
    for &word in &words {
        pool.free_deferred(word);
        assert!(pool.deferred_bytes() <= 1 << 18);
    }
    assert!(pool.deferred_bytes() > 0);
    assert!(pool.stats().objects_used() < 1000 && pool.stats().objects_used() > 0);
    let left = pool.stats().objects_used();
    assert_eq!(pool.flush_deferred(), Ok(left));
    assert_eq!((pool.deferred_bytes(), pool.stats().objects_used()), (0, 0));
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
}

#[test]
fn a_store_does_deferred_frees_before_it_takes_memory() {
    let config = Config::with_capacity_pages(1 << 12).shards(1);
    let pool = Pool::new(TestSource::default(), config).unwrap();
    let words: Vec<ObjectWord> = (0..60)
        .map(|n| pool.store(&[&contents(n, PAGE_SIZE)]).unwrap())
        .collect();
    pool.source().commits_left.set(0);
    assert!(pool.store(&[&contents(1, PAGE_SIZE)]).is_err());
    words.iter().for_each(|&word| pool.free_deferred(word));
    assert_eq!(pool.stats().objects_used(), 60);
    for n in 0..60 {
        pool.store(&[&contents(n, PAGE_SIZE)]).unwrap();
    }
    assert_eq!(pool.deferred_bytes(), 0);
}

#[test]
fn a_deferred_double_free_is_reported() {
    let config = Config::with_capacity_pages(1 << 12).shards(1);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    let (word, other) = (
        pool.store(&[b"one"]).unwrap(),
        pool.store(&[b"two"]).unwrap(),
    );
    pool.free_deferred(word);
    pool.free_deferred(word);
    pool.free_deferred(other);
    assert!(pool.flush_deferred().is_err());
    assert_eq!(pool.stats().deferred_misuse, 1);
    assert_eq!(pool.stats().objects_used(), 0);
}

/// Waits until a pool's memory is returned, which must take less than this many seconds.
fn wait_for_memory<S: zsmalloc::PageSource>(pool: &Pool<S>, seconds: u64) {
    let start = std::time::Instant::now();
    while pool.resident_bytes() > 0 {
        assert!(
            start.elapsed().as_secs() < seconds,
            "the memory did not come back"
        );
        thread::yield_now();
    }
}

#[test]
fn a_drainer_gives_the_memory_back() {
    let config = Config::with_capacity_pages(1 << 14).retained_pages(0);
    let pool = Arc::new(Pool::new(HeapSource::new(), config).unwrap());
    let drainer = Drainer::spawn(pool.clone()).unwrap();
    for round in 0..20 {
        let words: Vec<ObjectWord> = (0..1000)
            .map(|n| pool.store(&[&contents(n, 3000)]).unwrap())
            .collect();
        words.iter().for_each(|&word| pool.free_deferred(word));
        if round % 5 == 0 {
            wait_for_memory(&pool, 10);
        }
    }
    pool.store(&[b"deferred at the end"])
        .map(|word| pool.free_deferred(word))
        .unwrap();
    drop(drainer);
    assert_eq!(pool.stats().objects_used(), 0);
}

#[test]
fn a_drainer_gives_much_back_with_helpers() {
    // 40 MB: several times what a helper is started for.
    const OBJECTS: u64 = 40_000;
    let config = Config::with_capacity_pages(1 << 16)
        .shards(1)
        .deferred_bytes(2048 * OBJECTS as usize);
    let pool = Arc::new(Pool::new(TestSource::default(), config).unwrap());
    let words: Vec<ObjectWord> = (0..OBJECTS)
        .map(|n| pool.store(&[&contents(n, 1 + n as usize % 2000)]).unwrap())
        .collect();
    words.iter().for_each(|&word| pool.free_deferred(word));
    // A double free among them does not keep the others from being done.
    pool.free_deferred(words[OBJECTS as usize / 2]);
    assert_eq!(pool.stats().objects_used(), OBJECTS as usize);
    let drainer = Drainer::spawn(pool.clone()).unwrap();
    wait_for_memory(&pool, 20);
    drop(drainer);
    assert_eq!(pool.stats().objects_used(), 0);
    assert_eq!(pool.stats().deferred_misuse, 1);
}

#[test]
fn a_drainer_is_prepared_in_its_own_thread_before_it_frees() {
    let config = Config::with_capacity_pages(1 << 12);
    let pool = Arc::new(Pool::new(HeapSource::new(), config).unwrap());
    pool.free_deferred(pool.store(&[b"freed when all is prepared"]).unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    let its_pool = pool.clone();
    let drainer = Drainer::spawn_with(pool.clone(), move || {
        let name = thread::current().name().map(str::to_owned);
        let waiting = its_pool.stats().objects_used();
        sender.send((name, waiting)).unwrap();
    });
    let prepared = receiver.recv().unwrap();
    assert_eq!(prepared, (Some("zsmalloc-drain".to_owned()), 1));
    wait_for_memory(&pool, 10);
    drop(drainer.unwrap());
}

#[test]
fn handles_hold_what_a_map_holds() {
    let table = table(2);
    let mut random = Random::new(11);
    let mut oracle: std::collections::BTreeMap<Handle, Vec<u8>> =
        std::collections::BTreeMap::default();
    for step in 0..30_000_u64 {
        let victim = oracle
            .keys()
            .nth(random.below(oracle.len().clamp(1, 50)))
            .copied();
        match (random.below(10), victim) {
            (0..=3, Some(handle)) => {
                let bytes = oracle.remove(&handle).unwrap();
                table
                    .read(handle, |found| assert_eq!(found, bytes))
                    .unwrap();
                table.free(handle).unwrap();
            }
            (4, _) if random.below(20) == 0 => {
                table.compact(|| true);
            }
            _ => {
                let bytes = contents(
                    step,
                    1 + random.below(HandleTable::<TestSource>::MAX_LENGTH),
                );
                let handle = table.store(&bytes).unwrap();
                assert!(oracle.insert(handle, bytes).is_none());
            }
        }
        if oracle.len() > 3000 {
            let (handle, _) = oracle.pop_last().unwrap();
            table.free(handle).unwrap();
        }
    }
    for (&handle, bytes) in &oracle {
        table
            .read(handle, |found| assert_eq!(found, bytes))
            .unwrap();
    }
    check_stats(table.pool(), oracle.values().map(|bytes| bytes.len() + 4));
}
