//! An owner that keeps object words itself, and lets a pool compact under it.
//!
//! Run with `cargo run --release -p zsmalloc --example compaction`.

use std::sync::atomic::{AtomicU64, Ordering};

use zsmalloc::{AllocError, Config, HeapSource, ObjectWord, Pool, Relocate};

/// Entries that hold object words. Each object starts with the number of its entry.
struct Table(Vec<AtomicU64>);

impl Relocate for Table {
    fn relocate(&self, old: ObjectWord, new: ObjectWord, object: &[u8]) -> bool {
        let Some((number, _)) = object.split_first_chunk() else {
            return false;
        };
        self.0
            .get(u32::from_le_bytes(*number) as usize)
            .is_some_and(|entry| {
                entry
                    .compare_exchange(
                        old.into_raw(),
                        new.into_raw(),
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1 << 16))?;
    let store = |number: u32| -> Result<AtomicU64, AllocError> {
        let size = 200 + number as usize % 3000;
        let word = pool.store(&[&number.to_le_bytes(), &vec![number as u8; size]])?;
        Ok(AtomicU64::new(word.into_raw()))
    };
    let table = Table((0..20_000).map(store).collect::<Result<_, _>>()?);
    println!("stored:    {:>6} KiB", pool.resident_bytes() / 1024);

    let free = |entry: &AtomicU64| ObjectWord::from_raw(entry.swap(0, Ordering::AcqRel));
    let mut words: Vec<ObjectWord> = table
        .0
        .iter()
        .enumerate()
        .filter(|(n, _)| n % 3 != 0)
        .filter_map(|(_, e)| free(e))
        .collect();
    pool.free_bulk(&mut words);
    println!("freed 2/3: {:>6} KiB", pool.resident_bytes() / 1024);

    let report = pool.compact(&table, || true);
    pool.trim();
    println!(
        "compacted: {:>6} KiB, {report:?}",
        pool.resident_bytes() / 1024
    );

    // While a compactor may run, a word is loaded and used with a pin held.
    let pin = pool.pin();
    if let Some(word) = ObjectWord::from_raw(table.0[300].load(Ordering::Acquire)) {
        pool.read_slot(word, |slot| {
            println!("object 300 starts with {:?}", &slot[..6]);
        });
    }
    drop(pin);
    Ok(())
}
