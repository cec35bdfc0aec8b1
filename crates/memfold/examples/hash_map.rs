//! A hash map larger than the memory that it may use, the compressed part included.
//!
//! ```sh
//! cargo run --release -p memfold --example hash_map -- [--megabytes 128] [--limit 96]
//! ```

mod common;

use hashbrown::{DefaultHashBuilder, HashMap};
use memfold::{Memfold, RegionAllocator};
use std::time::Instant;

/// A record such as programs keep: numbers that are small or alike.
type Record = [u64; 7];

fn record(key: u64) -> Record {
    [key, key / 10, key / 100, 7, key % 10, 0, key / 1000]
}

fn main() -> Result<(), memfold::Error> {
    let [megabytes, limit] = common::numbers([("--megabytes", 128_u64), ("--limit", 96)]);
    let memfold = Memfold::builder().limit(limit << 20).build()?;
    let mut map: HashMap<u64, Record, DefaultHashBuilder, RegionAllocator> =
        HashMap::with_hasher_in(DefaultHashBuilder::default(), memfold.allocator());
    // A table of a power of two of places, seven eighths full, of 65 bytes each.
    let records = (megabytes << 20) / 65 * 7 / 8;
    let start = Instant::now();
    map.reserve(records as usize);
    for key in 0..records {
        map.insert(key, record(key));
    }
    println!(
        "{records} records inserted in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    let mut state = 1_u64;
    for _ in 0..records / 10 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let key = (state >> 33) % records;
        assert_eq!(map.get(&key), Some(&record(key)), "record {key} is wrong");
    }
    let stats = memfold.stats();
    if stats.over_limit_pages > 0 {
        eprintln!("the limit is too small for this data, even compressed");
        std::process::exit(1);
    }
    println!(
        "{} looked up at random, all right, in {:.1} s; {} MiB mapped, at most {} MiB resident, \
         {} MiB of pool, {} pages out, {} in",
        records / 10,
        start.elapsed().as_secs_f64(),
        stats.mapped_bytes >> 20,
        stats.peak_resident_bytes >> 20,
        stats.pool_bytes >> 20,
        stats.pages_out,
        stats.pages_in,
    );
    Ok(())
}
