//! What storing and freeing one object costs on one thread.
//!
//! Run with `cargo bench -p zsmalloc`. For each size: the median, the least and the most of several
//! runs, in nanoseconds a pair.

use std::time::Instant;

use zsmalloc::{Config, HeapSource, Pool};

const RUNS: usize = 15;
const PAIRS: u32 = 300_000;

fn main() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1 << 16))
        .expect("a small pool can be made");
    for size in [64, 256, 1024, 2048, 4096] {
        let object = vec![0x5a; size];
        let mut runs: Vec<f64> = (0..RUNS)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..PAIRS {
                    let word = pool.store(&[&object]).expect("there is room");
                    pool.free(word);
                }
                start.elapsed().as_nanos() as f64 / f64::from(PAIRS)
            })
            .collect();
        runs.sort_by(f64::total_cmp);
        let (least, most) = (runs[0], runs[RUNS - 1]);
        println!(
            "{size:>5} bytes: {:>6.1} ns ({least:.1} to {most:.1})",
            runs[RUNS / 2]
        );
    }
}
