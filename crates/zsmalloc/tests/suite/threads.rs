//! Many threads on one pool.

use std::{
    sync::{Mutex, atomic::Ordering},
    thread,
};

use crate::common::{TestSource, check_stats, contents};
use memfold_testing::Random;
use zsmalloc::{Config, HeapSource, ObjectWord, Pool};

struct Object {
    word: ObjectWord,
    seed: u64,
    size: usize,
}

fn store(pool: &Pool<TestSource>, random: &mut Random) -> Object {
    let (seed, size) = (random.next_word() >> 16, 1 + random.below(4096));
    let word = pool.store(&[&contents(seed, size)]).unwrap();
    Object { word, seed, size }
}

fn check(pool: &Pool<TestSource>, object: &Object) {
    pool.read_slot(object.word, |slot| {
        assert!(
            slot[..object.size] == contents(object.seed, object.size),
            "wrong bytes"
        );
    });
}

/// Threads store, check and free, half of the objects being freed by another thread.
#[test]
fn objects_survive_other_threads() {
    const THREADS: u64 = 6;
    let config = Config::with_capacity_pages(1 << 16)
        .shards(4)
        .retained_pages(64);
    let pool = Pool::new(TestSource::default(), config).unwrap();
    let shared: Mutex<Vec<Object>> = Mutex::new(Vec::new());
    let left: Vec<Object> = thread::scope(|scope| {
        let workers: Vec<_> = (1..=THREADS)
            .map(|number| {
                let (pool, shared) = (&pool, &shared);
                scope.spawn(move || work(pool, shared, number))
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    let mut left: Vec<Object> = left
        .into_iter()
        .chain(shared.into_inner().unwrap())
        .collect();
    left.iter().for_each(|object| check(&pool, object));
    check_stats(&pool, left.iter().map(|object| object.size));
    let mut words: Vec<ObjectWord> = left.drain(..).map(|object| object.word).collect();
    pool.free_bulk(&mut words);
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
    assert_eq!(pool.source().committed_pages.load(Ordering::Relaxed), 0);
}

fn work(pool: &Pool<TestSource>, shared: &Mutex<Vec<Object>>, number: u64) -> Vec<Object> {
    let mut random = Random::new(number);
    let mut own: Vec<Object> = Vec::new();
    for step in 0..6000 {
        match random.below(8) {
            0..=3 => own.push(store(pool, &mut random)),
            4 => shared.lock().unwrap().push(store(pool, &mut random)),
            5 => {
                let taken = shared.lock().unwrap().pop();
                if let Some(object) = taken {
                    check(pool, &object);
                    pool.free(object.word);
                }
            }
            _ if !own.is_empty() => {
                let object = own.swap_remove(random.below(own.len()));
                check(pool, &object);
                pool.free(object.word);
            }
            _ => {}
        }
        if step % 1000 == 999 {
            let half = own.split_off(own.len() / 2);
            half.iter().for_each(|object| check(pool, object));
            let mut words: Vec<ObjectWord> = half.iter().map(|object| object.word).collect();
            pool.free_bulk(&mut words);
        }
    }
    own
}

/// A free in one thread against a second free of the same word in another: exactly one succeeds.
#[test]
fn a_double_free_is_found_out_across_threads() {
    let config = Config::with_capacity_pages(1 << 12).shards(2);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    let words: Vec<ObjectWord> = (0..5000)
        .map(|n| pool.store(&[&contents(n, 100)]).unwrap())
        .collect();
    let free_all = || {
        words
            .iter()
            .filter(|&&word| pool.try_free(word).is_ok())
            .count()
    };
    let freed: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(free_all)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert_eq!(freed, words.len());
}
