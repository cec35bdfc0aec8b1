//! What a pool does with wrong requests and refused memory.

use std::{panic, sync::atomic::Ordering};

use crate::common::{TestSource, contents};
use memfold_testing::Random;
use zsmalloc::{
    AllocError, Config, HeapSource, MAX_CHAIN_PAGES, MisuseError, NewPoolError, ObjectWord,
    PAGE_SIZE, Pool, SizeClass, SourceError,
};

fn pool() -> Pool<HeapSource> {
    Pool::new(HeapSource::new(), Config::with_capacity_pages(4096)).unwrap()
}

#[test]
fn sizes_out_of_range_are_errors() {
    let pool = pool();
    assert_eq!(pool.store(&[]), Err(AllocError::Empty));
    assert_eq!(pool.store(&[b"", b""]), Err(AllocError::Empty));
    let large = vec![1; PAGE_SIZE];
    assert_eq!(
        pool.store(&[&large, b"1"]),
        Err(AllocError::TooLarge(PAGE_SIZE + 1))
    );
    assert!(pool.store(&[&large]).is_ok());
}

#[test]
fn a_double_free_is_found_out() {
    let pool = pool();
    let (word, other) = (
        pool.store(&[b"one"]).unwrap(),
        pool.store(&[b"two"]).unwrap(),
    );
    pool.free(word);
    assert_eq!(pool.try_free(word), Err(MisuseError::NotStored(word)));
    assert_eq!(
        pool.try_read_slot(word, |_| ()),
        Err(MisuseError::NotStored(word))
    );
    assert!(panic::catch_unwind(|| pool.free(word)).is_err());
    assert!(panic::catch_unwind(|| pool.read_slot(word, |_| ())).is_err());
    pool.read_slot(other, |slot| assert_eq!(&slot[..3], b"two"));
    pool.free(other);
    assert_eq!(pool.stats().objects_used(), 0);
}

#[test]
fn a_double_free_after_the_zspage_is_gone_is_found_out() {
    let pool = pool();
    let word = pool.store(&[&contents(1, 3000)]).unwrap();
    pool.free(word);
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
    assert!(pool.try_free(word).is_err());
    assert!(pool.try_read_slot(word, |_| ()).is_err());
}

#[test]
fn a_bulk_free_frees_the_good_words_and_reports_the_bad_one() {
    let pool = pool();
    let good: Vec<ObjectWord> = (0..500)
        .map(|n| pool.store(&[&contents(n, 700)]).unwrap())
        .collect();
    let foreign = ObjectWord::from_raw(good[0].into_raw() | 0xff).unwrap();
    for bad in [foreign, good[250]] {
        let mut words: Vec<ObjectWord> = good
            .iter()
            .map(|_| pool.store(&[&contents(1, 700)]).unwrap())
            .collect();
        words.extend([bad, bad]);
        let before = pool.stats().objects_used();
        assert!(pool.try_free_bulk(&mut words).is_err());
        let freed = before - pool.stats().objects_used();
        assert_eq!(freed, if bad == foreign { 500 } else { 501 });
    }
}

#[test]
fn a_bad_word_among_good_ones_of_its_zspage_does_no_damage() {
    let pool = pool();
    let bytes = |n| contents(n, 700);
    for at in [0, 1, 20, 39] {
        let mut words: Vec<ObjectWord> =
            (0..40).map(|n| pool.store(&[&bytes(n)]).unwrap()).collect();
        // A zspage of this class has fewer objects.
        let bad = ObjectWord::from_raw(words[at].into_raw() | 0xff).unwrap();
        words.insert(at, bad);
        assert!(pool.try_free_bulk(&mut words).is_err());
        assert_eq!(pool.stats().objects_used(), 0);
        let again: Vec<ObjectWord> = (0..40).map(|n| pool.store(&[&bytes(n)]).unwrap()).collect();
        for (n, &word) in again.iter().enumerate() {
            pool.read_slot(word, |slot| assert_eq!(slot[..700], bytes(n as u64)));
        }
        again.into_iter().for_each(|word| pool.free(word));
        assert_eq!(pool.stats().objects_used(), 0);
    }
}

#[test]
fn made_up_words_do_no_damage() {
    let pool = pool();
    let stored: Vec<(ObjectWord, Vec<u8>)> = (0..300)
        .map(|n| (contents(n, 1 + n as usize * 13), n))
        .map(|(bytes, _)| (pool.store(&[&bytes]).unwrap(), bytes))
        .collect();
    let known: std::collections::HashSet<ObjectWord> =
        stored.iter().map(|&(word, _)| word).collect();
    let mut random = Random::new(7);
    for round in 0..200_000 {
        let (near, bytes) = &stored[random.below(stored.len())];
        let near = near.into_raw();
        let raw = match random.below(3) {
            0 => (random.next_word() >> 16) & ((1 << ObjectWord::BITS) - 1),
            1 => near ^ (1 << random.below(50)),
            _ => near.wrapping_add(random.below(4096) as u64),
        };
        if let Some(word) = ObjectWord::from_raw(raw).filter(|word| !known.contains(word)) {
            assert!(pool.try_free(word).is_err());
            assert!(pool.try_read_slot(word, |_| ()).is_err());
            assert!(pool.try_free_bulk(&mut [word]).is_err());
            if round % 4 == 0 {
                // Next to a good word, which takes the lock that the other may seem to need.
                let good = pool.store(&[bytes]).unwrap();
                assert!(word == good || pool.try_free_bulk(&mut [good, word]).is_err());
                assert!(word != good || pool.try_free(good).is_ok());
            }
        }
    }
    assert_eq!(pool.stats().objects_used(), stored.len());
    for (word, bytes) in stored {
        pool.read_slot(word, |slot| {
            assert_eq!(&slot[..bytes.len()], bytes.as_slice());
        });
    }
}

#[test]
fn refused_commits_lose_nothing() {
    for after in 0..30 {
        let pool = Pool::new(TestSource::default(), Config::with_capacity_pages(1 << 14)).unwrap();
        pool.source().commits_left.set(after);
        let mut stored = Vec::new();
        let mut refused = 0;
        for n in 0..400 {
            let bytes = contents(n, 1 + (n as usize * 997) % PAGE_SIZE);
            match pool.store(&[&bytes]) {
                Ok(word) => stored.push((word, bytes)),
                Err(AllocError::Source(SourceError::Commit { .. })) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(refused > 0);
        crate::common::check_stats(&pool, stored.iter().map(|(_, bytes)| bytes.len()));
        pool.source().commits_left.set(-1);
        assert!(pool.store(&[&contents(1, PAGE_SIZE)]).is_ok());
        for (word, bytes) in stored {
            pool.read_slot(word, |slot| {
                assert_eq!(&slot[..bytes.len()], bytes.as_slice());
            });
            pool.free(word);
        }
    }
}

#[test]
fn what_could_not_be_given_back_stays_counted() {
    let config = Config::with_capacity_pages(1 << 12).retained_pages(0);
    let pool = Pool::new(TestSource::default(), config).unwrap();
    let word = pool.store(&[&contents(1, 4000)]).unwrap();
    let resident = pool.resident_bytes();
    pool.source().discards_left.set(0);
    pool.free(word);
    assert_eq!((pool.resident_bytes(), pool.trim()), (resident, 0));
    assert!(pool.stats().discard_failures > 0);
    pool.source().discards_left.set(-1);
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
    assert_eq!(pool.source().committed_pages.load(Ordering::Relaxed), 0);
}

#[test]
fn a_full_range_is_an_error() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1024)).unwrap();
    let mut words = Vec::new();
    let error = loop {
        match pool.store(&[&contents(1, PAGE_SIZE)]) {
            Ok(word) => words.push(word),
            Err(error) => break error,
        }
    };
    assert_eq!(error, AllocError::RangeFull);
    assert_eq!(words.len(), 1024);
    pool.free_bulk(&mut words);
    assert!(pool.store(&[&contents(1, PAGE_SIZE)]).is_ok());
}

#[test]
fn a_pool_of_the_capacity_for_its_contents_holds_any_sizes_after_each_other() {
    const PAGES: usize = 512;
    let config = Config::with_capacity_pages(Config::capacity_for(PAGES)).shards(1);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    let sizes: Vec<usize> = pool.classes().iter().map(SizeClass::size).collect();
    for size in sizes.into_iter().rev() {
        let mut words = Vec::new();
        while pool.resident_bytes() < (PAGES - MAX_CHAIN_PAGES) * PAGE_SIZE {
            let stored = pool.store(&[&contents(1, size)]);
            words.push(stored.unwrap_or_else(|error| panic!("{size} bytes: {error}")));
        }
        pool.free_bulk(&mut words);
        pool.trim();
    }
}

#[test]
fn a_panic_while_filling_frees_the_slot() {
    let pool = pool();
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| {
        pool.store_with(100, |_| panic!("on purpose"))
    }));
    assert!(result.is_err());
    assert_eq!(pool.stats().objects_used(), 0);
}

#[test]
fn senseless_configurations_are_errors() {
    for config in [
        Config::new().max_chain_pages(0),
        Config::new().max_chain_pages(17),
        Config::with_capacity_pages(usize::MAX),
    ] {
        assert!(matches!(
            Pool::new(HeapSource::new(), config),
            Err(NewPoolError::Config(_))
        ));
    }
}

#[test]
fn freed_bytes_are_not_seen_again_when_asked_for() {
    let config = Config::with_capacity_pages(1024).zero_freed(true);
    let pool = Pool::new(HeapSource::new(), config).unwrap();
    for size in [1, 7, 100, 1000, 4000] {
        let class = pool
            .classes()
            .iter()
            .find(|class| class.size() >= size)
            .unwrap()
            .size();
        let secret = pool.store(&[&vec![0xaa; class]]).unwrap();
        pool.free(secret);
        let word = pool.store_with(size, |bytes| bytes.fill(1)).unwrap();
        pool.read_slot(word, |slot| {
            assert!(slot.len() == class && slot[size..].iter().all(|&byte| byte == 0));
        });
        pool.free(word);
    }
}

#[test]
fn a_read_gives_exactly_the_length_asked_for() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1024)).unwrap();
    let word = pool.store(&[b"seven b"]).unwrap();
    pool.read(word, 7, |object| assert_eq!(object, b"seven b"));
    let slot = pool.slot_bytes(word).unwrap();
    assert_eq!(pool.try_read(word, slot, <[u8]>::len), Ok(slot));
    let len = slot + 1;
    let too_long = pool.try_read(word, len, |_| ());
    assert_eq!(too_long, Err(MisuseError::TooLong { word, len }));
    assert!(panic::catch_unwind(|| pool.read(word, len, |_| ())).is_err());
}
