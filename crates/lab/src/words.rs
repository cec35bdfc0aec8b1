//! The table in which the owner of a pool keeps its object words.

use std::sync::atomic::{AtomicU64, Ordering};

use zsmalloc::{ObjectWord, Relocate};

/// Bytes at the start of each object that hold its number, by which compaction finds its word.
pub const NUMBER_BYTES: usize = size_of::<u32>();

/// An object word for each number; 0 where there is no object.
#[derive(Debug)]
pub struct Words(Vec<AtomicU64>);

impl Words {
    /// Room for the numbers below `objects`.
    pub fn new(objects: usize) -> Self {
        Self((0..objects).map(|_| AtomicU64::new(0)).collect())
    }

    /// What the object of a number starts with.
    pub fn head(number: usize) -> [u8; NUMBER_BYTES] {
        (number as u32).to_le_bytes()
    }

    /// Publishes the word of an object: from now on compaction may change it.
    pub fn put(&self, number: usize, word: ObjectWord) {
        self.0[number].store(word.into_raw(), Ordering::Release);
    }

    /// Takes the word of an object out of the table, after which compaction cannot change it.
    pub fn take(&self, number: usize) -> Option<ObjectWord> {
        ObjectWord::from_raw(self.0[number].swap(0, Ordering::AcqRel))
    }
}

impl Relocate for Words {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let Some((number, _)) = object.split_first_chunk() else {
            return false;
        };
        let number = u32::from_le_bytes(*number) as usize;
        self.0.get(number).is_some_and(|word| {
            let (old, new) = (old.into_raw(), new.into_raw());
            word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
    }
}
