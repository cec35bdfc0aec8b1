//! A discard of 1 GiB: how long its caller waits, and what it costs in all, beside a discard that frees the
//! blocks on the spot: `cargo bench -p memfold-disk --bench discard [-- ROUNDS]`, in turn.
#![allow(missing_docs, reason = "a program")]

use memfold_disk::{BLOCK, Disk};
use memfold_pager::MappedSource;
use memfold_swap::{Scratch, SwapConfig, SwapSpace};
use std::time::{Duration, Instant};

const SIZE: u64 = 1 << 30;
const LIMIT: u64 = 2 << 30;

/// What a discard took.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Until it returned.
    caller: Duration,
    /// Until all was free.
    freed: Duration,
    /// CPU time of all threads until then.
    cpu: Duration,
}

fn disk() -> Disk<MappedSource> {
    let config = SwapConfig {
        pool_capacity_pages: SwapConfig::capacity_for((LIMIT / BLOCK) as usize),
        max_slots: (2 * SIZE / BLOCK) as usize,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(MappedSource::default(), config).expect("a swap space");
    Disk::new(space, SIZE, LIMIT).expect("a disk")
}

/// Blocks that compress to about 40 %, each a different one.
fn fill(disk: &Disk<MappedSource>, scratch: &mut Scratch) {
    let mut random = memfold_testing::Random::new(1);
    let mut data = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(data.len()) {
        for page in data.chunks_mut(BLOCK as usize) {
            for word in page[..BLOCK as usize * 2 / 5].chunks_exact_mut(8) {
                word.copy_from_slice(&random.next_word().to_le_bytes());
            }
        }
        disk.write(offset, &data, scratch).expect("there is room");
    }
}

/// CPU time of all threads so far.
fn cpu() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").expect("/proc");
    let nanoseconds = threads.map(|thread| {
        let path = thread.expect("a thread").path().join("schedstat");
        let text = std::fs::read_to_string(path).expect("schedstat");
        let first = text.split_whitespace().next().expect("a number");
        first.parse::<u64>().expect("nanoseconds")
    });
    Duration::from_nanos(nanoseconds.sum())
}

fn measure(in_caller: bool) -> Cost {
    let mut disk = disk();
    disk.free_in_caller(in_caller);
    fill(&disk, &mut Scratch::new());
    let used = disk.used_bytes();
    let (before, began) = (cpu(), Instant::now());
    disk.discard(0, SIZE).expect("it is inside");
    let caller = began.elapsed();
    // Not by settling them, which would help the worker.
    while disk.usage().discard_backlog_blocks > 0 {
        std::thread::sleep(Duration::from_micros(200));
    }
    let (freed, cpu) = (began.elapsed(), cpu().saturating_sub(before));
    assert_eq!(disk.usage().original_bytes, 0);
    assert!(disk.used_bytes() < used / 4, "it was freed");
    Cost { caller, freed, cpu }
}

fn print(what: &str, costs: &[Cost], of: fn(&Cost) -> Duration) -> f64 {
    let mut values: Vec<f64> = costs
        .iter()
        .map(|cost| of(cost).as_secs_f64() * 1e3)
        .collect();
    values.sort_by(f64::total_cmp);
    let (least, most) = (values[0], values[values.len() - 1]);
    let median = values[values.len() / 2];
    println!("{what:32} {median:9.3} ms  ({least:.3} to {most:.3})");
    median
}

fn main() {
    let mut rounds = std::env::args().filter_map(|argument| argument.parse().ok());
    let rounds: usize = rounds.next_back().unwrap_or(9);
    let (mut deferred, mut on_the_spot) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        deferred.push(measure(false));
        on_the_spot.push(measure(true));
    }
    println!("discard of 1 GiB, {rounds} rounds in turn: median, least, most");
    let here = print("by the worker: caller", &deferred, |cost| cost.caller);
    print("by the worker: all is free", &deferred, |cost| cost.freed);
    let cpu = print("by the worker: CPU time", &deferred, |cost| cost.cpu);
    let there = print("on the spot: caller", &on_the_spot, |cost| cost.caller);
    let cpu_there = print("on the spot: CPU time", &on_the_spot, |cost| cost.cpu);
    println!(
        "the caller waits 1/{:.0} as long, and it costs {:.2} times the CPU time",
        there / here,
        cpu / cpu_there
    );
}
