//! Whole pools under loom: frees and reads against compaction.

use loom::{sync::Arc, thread};

use crate::{
    Config, HeapSource, ObjectWord, PAGE_SIZE, Pool, Relocate,
    sync::atomic::{AtomicU64, Ordering},
};

/// An owner with one entry for each object; an object's first byte is its number.
struct Owner {
    pool: Pool<HeapSource>,
    entries: Vec<AtomicU64>,
}

impl Owner {
    fn word(&self, number: usize) -> ObjectWord {
        ObjectWord::from_raw(self.entries[number].load(Ordering::Acquire)).unwrap()
    }
}

impl Relocate for Owner {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        self.entries[usize::from(object[0])]
            .compare_exchange(
                old.into_raw(),
                new.into_raw(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }
}

/// A pool of one shard with nothing in it.
fn empty_owner() -> Owner {
    let config = Config::with_capacity_pages(1024)
        .max_chain_pages(1)
        .shards(1)
        .deferred_bytes(0)
        .retained_pages(0);
    Owner {
        pool: Pool::new(HeapSource::new(), config).unwrap(),
        entries: Vec::new(),
    }
}

/// A pool with one object in each of two zspages of two slots.
fn owner() -> Owner {
    let pool = empty_owner().pool;
    let object = |number: u8| pool.store(&[&[number; PAGE_SIZE / 2]]).unwrap();
    let words = [object(0), object(8), object(1), object(9)];
    pool.free(words[1]);
    pool.free(words[3]);
    let entries = [words[0], words[2]].map(|word| AtomicU64::new(word.into_raw()));
    Owner {
        pool,
        entries: entries.into(),
    }
}

/// Runs `check`, which returns the number of objects moved, in all interleavings; in some of them
/// an object must move.
fn model(check: impl Fn() -> usize + Sync + Send + 'static) {
    let moved = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let total = moved.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 100_000;
    model.check(move || {
        moved.fetch_add(check(), Ordering::Relaxed);
    });
    assert!(total.load(Ordering::Relaxed) > 0, "nothing was ever moved");
}

/// An object is freed while a compactor moves it: the free wins or the move, and exactly one slot
/// is freed either way.
#[test]
fn a_free_against_compaction() {
    model(|| {
        let owner = Arc::new(owner());
        let freer = {
            let owner = owner.clone();
            thread::spawn(move || {
                let word = owner.entries[1].swap(0, Ordering::AcqRel);
                owner.pool.free(ObjectWord::from_raw(word).unwrap());
            })
        };
        let report = owner.pool.compact(&*owner, || true);
        freer.join().unwrap();
        assert_eq!(owner.pool.stats().objects_used(), 1);
        owner
            .pool
            .read_slot(owner.word(0), |bytes| assert_eq!(bytes[0], 0));
        report.objects_moved
    });
}

/// An object is read while a compactor moves it: the bytes are the object's, wherever they are
/// read.
#[test]
fn a_read_against_compaction() {
    model(|| {
        let owner = Arc::new(owner());
        let reader = {
            let owner = owner.clone();
            thread::spawn(move || {
                for number in 0..2 {
                    let _pin = owner.pool.pin();
                    let word = owner.word(number);
                    owner
                        .pool
                        .read_slot(word, |bytes| assert_eq!(usize::from(bytes[0]), number));
                }
            })
        };
        let report = owner.pool.compact(&*owner, || true);
        reader.join().unwrap();
        assert_eq!(owner.pool.stats().objects_used(), 2);
        report.objects_moved
    });
}

/// Two threads of one shard that find no free slot both bring a zspage; when their objects are
/// gone, all memory is. (A zspage that was put on a list empty would stay forever.)
#[test]
fn two_stores_that_both_bring_a_zspage() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let owner = Arc::new(empty_owner());
        let store = |owner: &Owner| owner.pool.store(&[&[1; PAGE_SIZE / 2]]).unwrap();
        let other = {
            let owner = owner.clone();
            thread::spawn(move || store(&owner))
        };
        let words = [store(&owner), other.join().unwrap()];
        words.into_iter().for_each(|word| owner.pool.free(word));
        owner.pool.trim();
        assert_eq!(owner.pool.resident_bytes(), 0);
    });
}
