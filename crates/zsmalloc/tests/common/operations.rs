//! An interpreter that turns any bytes into operations on a pool and checks it against what it
//! should hold. The fuzz target and a test share it.

use std::sync::atomic::{AtomicU64, Ordering};

use zsmalloc::{Config, HeapSource, MAX_CHAIN_PAGES, ObjectWord, PAGE_SIZE, Pool, Relocate};

/// Objects that can be stored at once.
const ENTRIES: usize = 256;

/// Each object starts with the number of its entry, and goes on with one byte over and over.
struct Owner {
    words: Vec<AtomicU64>,
    objects: Vec<Option<(u8, usize)>>,
    refuses: bool,
}

impl Relocate for Owner {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        !self.refuses
            && self.words[usize::from(object[0])]
                .compare_exchange(
                    old.into_raw(),
                    new.into_raw(),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                )
                .is_ok()
    }
}

impl Owner {
    fn word(&self, entry: usize) -> ObjectWord {
        ObjectWord::from_raw(self.words[entry].load(Ordering::Relaxed)).expect("an object is there")
    }

    fn take(&mut self, entry: usize) -> Option<ObjectWord> {
        self.objects[entry].take()?;
        ObjectWord::from_raw(self.words[entry].swap(0, Ordering::Relaxed))
    }

    fn store(&mut self, pool: &Pool<HeapSource>, entry: usize, fill: u8, size: usize) {
        if self.objects[entry].is_some() {
            return;
        }
        let body = vec![fill; size - 1];
        if let Ok(word) = pool.store(&[&[entry as u8], &body]) {
            self.words[entry].store(word.into_raw(), Ordering::Relaxed);
            self.objects[entry] = Some((fill, size));
        }
    }

    fn check(&self, pool: &Pool<HeapSource>, entry: usize) {
        if let Some((fill, size)) = self.objects[entry] {
            pool.read_slot(self.word(entry), |slot| {
                assert_eq!(usize::from(slot[0]), entry);
                assert!(
                    slot[1..size].iter().all(|&byte| byte == fill),
                    "wrong bytes"
                );
            });
        }
    }
}

/// Runs the operations that `input` stands for.
pub(crate) fn run(input: &[u8]) {
    let [chain, retained, rest @ ..] = input else {
        return;
    };
    let config = Config::with_capacity_pages(1 << 12)
        .max_chain_pages(1 + usize::from(*chain) % MAX_CHAIN_PAGES)
        .retained_pages(usize::from(*retained))
        .zero_freed(chain & 0x80 != 0)
        .deferred_bytes(1 << 16)
        .shards(2);
    let pool = Pool::new(HeapSource::new(), config).expect("the configuration is sound");
    let mut owner = Owner {
        words: (0..ENTRIES).map(|_| AtomicU64::new(0)).collect(),
        objects: vec![None; ENTRIES],
        refuses: false,
    };
    for operation in rest.chunks_exact(4) {
        step(
            &pool,
            &mut owner,
            [operation[0], operation[1], operation[2], operation[3]],
        );
    }
    finish(&pool, owner);
}

fn step(pool: &Pool<HeapSource>, owner: &mut Owner, [kind, entry, low, high]: [u8; 4]) {
    let entry = usize::from(entry);
    let number = usize::from(u16::from_le_bytes([low, high]));
    match kind % 12 {
        0..=4 => owner.store(pool, entry, kind ^ low, 1 + number % PAGE_SIZE),
        5 => {
            if let Some(word) = owner.take(entry) {
                pool.free(word);
                assert!(pool.try_free(word).is_err());
            }
        }
        6 => {
            if let Some(word) = owner.take(entry) {
                pool.free_deferred(word);
            }
        }
        7 => {
            let end = ENTRIES.min(entry + number % 64);
            let mut words: Vec<_> = (entry..end).filter_map(|entry| owner.take(entry)).collect();
            pool.free_bulk(&mut words);
        }
        8 => {
            owner.refuses = low & 1 != 0;
            let mut left = usize::from(high);
            pool.compact(owner, || {
                left = left.saturating_sub(1);
                left > 0
            });
        }
        9 => {
            pool.trim();
        }
        10 => assert!(pool.flush_deferred().is_ok()),
        _ => owner.check(pool, entry),
    }
}

fn finish(pool: &Pool<HeapSource>, mut owner: Owner) {
    assert!(pool.flush_deferred().is_ok());
    assert_eq!(pool.deferred_bytes(), 0);
    let stored = owner.objects.iter().flatten().count();
    assert_eq!(pool.stats().objects_used(), stored);
    for entry in 0..ENTRIES {
        owner.check(pool, entry);
        if let Some(word) = owner.take(entry) {
            pool.free(word);
        }
    }
    pool.trim();
    assert_eq!(pool.resident_bytes(), 0);
}
