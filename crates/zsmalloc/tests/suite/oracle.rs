//! Sequences of operations on a pool, compared with a map that holds the same objects.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use crate::common::{TestSource, check_stats, contents};
use proptest::prelude::*;
use zsmalloc::{AllocError, Config, ObjectWord, PAGE_SIZE, Pool};

#[derive(Debug, Clone)]
enum Operation {
    Store {
        parts: Vec<usize>,
    },
    Free {
        victim: usize,
    },
    FreeBulk {
        victims: Vec<usize>,
    },
    Trim,
    /// Lets this many commits succeed, and no more.
    FailCommits {
        after: i64,
    },
    FailDiscards {
        after: i64,
    },
    /// Grants this many huge pages, and no more.
    FailHuge {
        after: i64,
    },
    Mend,
}

fn operation() -> impl Strategy<Value = Operation> {
    let size = prop_oneof![1..=64_usize, 1..=PAGE_SIZE, Just(PAGE_SIZE), Just(2048)];
    prop_oneof![
        12 => size.prop_map(|size| Operation::Store { parts: vec![size] }),
        2 => prop::collection::vec(0..1024_usize, 0..5).prop_map(|parts| Operation::Store { parts }),
        6 => any::<usize>().prop_map(|victim| Operation::Free { victim }),
        2 => prop::collection::vec(any::<usize>(), 0..40)
            .prop_map(|victims| Operation::FreeBulk { victims }),
        1 => Just(Operation::Trim),
        1 => (0..4_i64).prop_map(|after| Operation::FailCommits { after }),
        1 => (0..2_i64).prop_map(|after| Operation::FailDiscards { after }),
        1 => (0..4_i64).prop_map(|after| Operation::FailHuge { after }),
        1 => Just(Operation::Mend),
    ]
}

/// A configuration, and whether it zeroes what is freed.
fn config() -> impl Strategy<Value = (Config, bool)> {
    (
        1..=16_usize,
        any::<bool>(),
        1..=4_usize,
        prop_oneof![Just(0_usize), Just(8), Just(256)],
        prop_oneof![Just(0_usize), Just(1), Just(4)],
    )
        .prop_map(
            |(max_chain_pages, zero_freed, shards, retained_pages, spare_part)| {
                let config = Config::with_capacity_pages(1 << 14)
                    .max_chain_pages(max_chain_pages)
                    .zero_freed(zero_freed)
                    .shards(shards)
                    .retained_pages(retained_pages)
                    .spare_part(spare_part);
                (config, zero_freed)
            },
        )
}

type Oracle = BTreeMap<ObjectWord, Vec<u8>>;

fn nth(oracle: &Oracle, n: usize) -> Option<ObjectWord> {
    (!oracle.is_empty()).then(|| *oracle.keys().nth(n % oracle.len()).unwrap())
}

fn store(pool: &Pool<&TestSource>, oracle: &mut Oracle, parts: &[usize], seed: u64) {
    let parts: Vec<Vec<u8>> = parts
        .iter()
        .enumerate()
        .map(|(n, &size)| contents(seed * 8 + n as u64, size))
        .collect();
    let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let whole = parts.concat();
    match pool.store(&slices) {
        Ok(word) => assert!(
            oracle.insert(word, whole).is_none(),
            "a word was given out twice"
        ),
        Err(AllocError::Empty) => assert!(whole.is_empty()),
        Err(AllocError::TooLarge(size)) => assert!(size == whole.len() && size > PAGE_SIZE),
        Err(AllocError::Source(_)) => {
            assert!(pool.source().commits_left.0.load(Ordering::Relaxed) == 0);
        }
        Err(error) => panic!("{error}"),
    }
}

fn check_contents(pool: &Pool<&TestSource>, oracle: &Oracle, zero_freed: bool) {
    let mut places: Vec<(usize, usize)> = Vec::new();
    for (&word, bytes) in oracle {
        pool.read_slot(word, |slot| {
            assert_eq!(&slot[..bytes.len()], bytes.as_slice());
            assert!(!zero_freed || slot[bytes.len()..].iter().all(|&byte| byte == 0));
            places.push((slot.as_ptr() as usize, slot.len()));
        });
    }
    places.sort_unstable();
    assert!(
        places
            .windows(2)
            .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
        "objects overlap"
    );
    check_stats(pool, oracle.values().map(Vec::len));
    let committed = pool.source().committed_pages.load(Ordering::Relaxed);
    assert_eq!(committed as usize * PAGE_SIZE, pool.resident_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn a_pool_holds_what_a_map_holds(
        ((config, zero_freed), huge_pages) in (config(), prop_oneof![Just(0_usize), Just(16), Just(64)]),
        operations in prop::collection::vec(operation(), 1..300),
    ) {
        let source = TestSource::with_huge_pages(huge_pages);
        let pool = Pool::new(&source, config).unwrap();
        let mut oracle = Oracle::new();
        for (seed, operation) in operations.into_iter().enumerate() {
            match operation {
                Operation::Store { parts } => store(&pool, &mut oracle, &parts, seed as u64),
                Operation::Free { victim } => {
                    if let Some(word) = nth(&oracle, victim) {
                        oracle.remove(&word);
                        pool.free(word);
                        prop_assert!(pool.try_free(word).is_err());
                        prop_assert!(pool.try_read_slot(word, |_| ()).is_err());
                    }
                }
                Operation::FreeBulk { victims } => {
                    let mut words = Vec::new();
                    for victim in victims {
                        if let Some(word) = nth(&oracle, victim) {
                            oracle.remove(&word);
                            words.push(word);
                        }
                    }
                    pool.free_bulk(&mut words);
                }
                Operation::Trim => {
                    pool.trim();
                }
                Operation::FailCommits { after } => source.commits_left.set(after),
                Operation::FailHuge { after } => source.huge_left.set(after),
                Operation::FailDiscards { after } => source.discards_left.set(after),
                Operation::Mend => {
                    source.commits_left.set(-1);
                    source.huge_left.set(-1);
                    source.discards_left.set(-1);
                }
            }
        }
        check_contents(&pool, &oracle, zero_freed);
        source.discards_left.set(-1);
        let mut words: Vec<ObjectWord> = oracle.keys().copied().collect();
        pool.free_bulk(&mut words);
        pool.trim();
        prop_assert_eq!(pool.resident_bytes(), 0);
        prop_assert_eq!(source.committed_pages.load(Ordering::Relaxed), 0);
    }
}

/// A class that has lost objects lends their slots to the one below it, before that takes memory.
#[test]
fn a_spare_slot_of_a_slightly_larger_class_is_used_first() {
    let config = Config::with_capacity_pages(1 << 12).shards(1);
    let pool = Pool::new(TestSource::default(), config).unwrap();
    let (size, larger, too_large) = (1600, 1664, 1744);
    let store = |size: usize, seed| pool.store(&[&contents(seed, size)]).unwrap();
    let in_class = |size: usize| {
        let stats = pool.stats();
        let class = stats.classes.iter().find(|c| c.class_size >= size);
        class.copied().unwrap()
    };
    let zspages_of = |size| {
        let objects = in_class(size).objects_per_zspage as u64;
        (0..3 * objects).map(|seed| store(size, seed)).collect()
    };
    let own: Vec<ObjectWord> = zspages_of(size);
    let lending: Vec<ObjectWord> = zspages_of(larger);
    let other: Vec<ObjectWord> = zspages_of(too_large);
    assert!(in_class(size).class_size < in_class(larger).class_size);
    let pages = pool.resident_bytes();
    let gone = lending[0];
    pool.free(gone);
    pool.free(other[0]);

    let borrowed = store(size, 77);
    assert_eq!(pool.resident_bytes(), pages);
    assert_eq!(in_class(larger).objects_used, lending.len());
    assert_eq!(in_class(size).objects_used, own.len());
    pool.read_slot(borrowed, |slot| {
        assert!(slot.len() == in_class(larger).class_size);
        assert!(slot[..size] == contents(77, size));
    });
    // What lies around it is as it was.
    for (words, size) in [(&own, size), (&lending, larger), (&other, too_large)] {
        for (seed, &word) in words.iter().enumerate().skip(1) {
            pool.read_slot(word, |slot| {
                assert!(slot[..size] == contents(seed as u64, size));
            });
        }
    }
    // Nothing is left that is near enough.
    store(size, 78);
    assert!(pool.resident_bytes() > pages);
    pool.free(borrowed);
    assert_eq!(in_class(larger).objects_used, lending.len() - 1);
}
