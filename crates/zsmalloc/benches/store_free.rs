//! The cost of storing and freeing one object on one thread.
//!
//! Run with `cargo bench -p zsmalloc`. For each size, in nanoseconds a pair: the median, the least
//! and the most of several runs, of
//!
//! - a store, which copies the object, and a free;
//! - a slot that is not filled, and a free: the allocator alone;
//! - the copy alone;
//! - the same with `malloc`: a copy in a box of its own, and its drop.
//!
//! They alternate, so that other load on the machine affects all of them.

use std::{hint::black_box, time::Instant};

use zsmalloc::{Config, HeapSource, PAGE_SIZE, Pool};

const RUNS: usize = 101;
const PAIRS: u32 = 10_000;
const WHAT: [&str; 4] = [
    "store + free",
    "place + free",
    "copy",
    "malloc + copy + free",
];

fn main() {
    let pool = Pool::new(HeapSource::new(), Config::with_capacity_pages(1 << 16))
        .expect("a small pool can be made");
    let mut place = vec![0; PAGE_SIZE];
    println!(
        "{:>5}  {}",
        "bytes",
        WHAT.map(|what| format!("{what:>24}")).concat()
    );
    for size in [64, 256, 512, 1024, 1536, 2048, 3072, 4096] {
        let object = vec![0x5a; size];
        let mut runs = [const { Vec::new() }; WHAT.len()];
        for _ in 0..RUNS {
            runs[0].push(time(|| {
                let word = pool.store(&[black_box(&object)]).expect("there is room");
                pool.free(word);
            }));
            runs[1].push(time(|| {
                let word = pool.store_with(black_box(size), |_| ());
                pool.free(word.expect("there is room"));
            }));
            runs[2].push(time(|| {
                black_box(&mut place)[..size].copy_from_slice(black_box(&object));
            }));
            runs[3].push(time(|| drop(black_box(black_box(&object[..]).to_vec()))));
        }
        let columns = runs.map(|mut runs| {
            runs.sort_by(f64::total_cmp);
            let (least, median, most) = (runs[0], runs[RUNS / 2], runs[RUNS - 1]);
            format!("{:>24}", format!("{median:.1} ({least:.1} to {most:.1})"))
        });
        println!("{size:>5}  {}", columns.concat());
    }
}

/// Nanoseconds that `work` takes, on average.
fn time(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..PAIRS {
        work();
    }
    start.elapsed().as_nanos() as f64 / f64::from(PAIRS)
}
