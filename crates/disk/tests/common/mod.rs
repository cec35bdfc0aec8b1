//! What tests of the disk share.
#![allow(
    unreachable_pub,
    reason = "nothing in a test is reachable from outside"
)]

use memfold_disk::Disk;
use memfold_swap::{SwapConfig, SwapSpace};
use std::time::{Duration, Instant};
use zsmalloc::HeapSource;

pub fn disk(size: u64, limit: u64) -> Disk<HeapSource> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 14,
        max_slots: 1 << 16,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    Disk::new(space, size, limit).expect("a disk")
}

pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = memfold_testing::Random::new(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

/// Waits for other threads.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
