//! The disk against an oracle, its limit, and what it counts.

use memfold_disk::{BLOCK, Disk, DiskError, NewDiskError};
use memfold_swap::{Scratch, SwapConfig, SwapSpace};
use proptest::prelude::*;
use zsmalloc::HeapSource;

fn disk(size: u64, limit: u64) -> Disk<HeapSource> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 14,
        max_slots: 1 << 16,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    Disk::new(space, size, limit).expect("a disk")
}

#[derive(Debug, Clone)]
enum Request {
    Write(u64, usize, u8),
    /// Different bytes, which do not compress.
    Noise(u64, usize),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Read(u64, usize),
}

const SIZE: u64 = 5 << 20;

fn request() -> impl Strategy<Value = Request> {
    let offset = prop_oneof![0..SIZE, (0..SIZE / BLOCK).prop_map(|block| block * BLOCK)];
    let length = prop_oneof![
        1..3 * BLOCK,
        (1..80_u64).prop_map(|blocks| blocks * BLOCK),
        Just(4 << 20)
    ];
    (offset, length, any::<u8>(), 0..6_u32).prop_map(|(offset, length, byte, kind)| {
        let length = length.min(SIZE - offset);
        match kind {
            0 => Request::Write(offset, length as usize, byte),
            1 => Request::Noise(offset, length as usize),
            2 => Request::Zero(offset, length, byte.is_multiple_of(2)),
            3 => Request::Discard(offset, length),
            _ => Request::Read(offset, length as usize),
        }
    })
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = memfold_testing::Random::new(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reads_see_the_last_write(requests in proptest::collection::vec(request(), 1..40)) {
        let disk = disk(SIZE, 1 << 30);
        let mut scratch = Scratch::new();
        let mut expected = vec![0_u8; SIZE as usize];
        for (number, request) in requests.into_iter().enumerate() {
            match request {
                Request::Write(offset, length, byte) => {
                    let data = vec![byte; length];
                    disk.write(offset, &data, &mut scratch).expect("there is room");
                    expected[offset as usize..][..length].copy_from_slice(&data);
                }
                Request::Noise(offset, length) => {
                    let data = noise(number as u64, length);
                    disk.write(offset, &data, &mut scratch).expect("there is room");
                    expected[offset as usize..][..length].copy_from_slice(&data);
                }
                Request::Zero(offset, length, keep) => {
                    disk.zero(offset, length, keep, &mut scratch).expect("there is room");
                    expected[offset as usize..][..length as usize].fill(0);
                }
                Request::Discard(offset, length) => {
                    disk.discard(offset, length).expect("it is inside");
                    let (start, end) = (offset.next_multiple_of(BLOCK), (offset + length) / BLOCK * BLOCK);
                    if start < end {
                        expected[start as usize..end as usize].fill(0);
                    }
                }
                Request::Read(offset, length) => {
                    let mut out = vec![1; length];
                    disk.read(offset, &mut out, &mut scratch).expect("it is there");
                    prop_assert!(out == expected[offset as usize..][..length]);
                }
            }
        }
        let mut all = vec![1; SIZE as usize];
        disk.read(0, &mut all, &mut scratch).expect("it is there");
        prop_assert!(all == expected);
        // Extents cover the disk, and those of zeros are.
        let mut at = 0;
        while at < SIZE {
            let extent = disk.extent(at, SIZE);
            prop_assert!(extent.length > 0 && at + extent.length <= SIZE);
            prop_assert!(extent.zero || !extent.hole);
            if extent.zero {
                let bytes = &expected[at as usize..(at + extent.length) as usize];
                prop_assert!(bytes.iter().all(|byte| *byte == 0));
            }
            at += extent.length;
        }
        // Discarded, it takes no more than its map.
        disk.discard(0, SIZE).expect("it is inside");
        disk.settle_discards();
        prop_assert_eq!(disk.usage().original_bytes, 0);
    }
}

#[test]
fn a_full_disk_refuses_writes_and_loses_nothing() {
    let disk = disk(64 << 20, 8 << 20);
    let mut scratch = Scratch::new();
    let mut written = 0;
    let failure = loop {
        let data = noise(written, BLOCK as usize);
        match disk.write(written * BLOCK, &data, &mut scratch) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(failure, DiskError::NoSpace);
    assert!(written * BLOCK > 4 << 20, "only {written} blocks fit");
    let usage = disk.usage();
    assert!(usage.peak_bytes <= usage.limit_bytes, "{usage:?}");
    assert_eq!(usage.failed_writes, 1);
    // Nor does an overwrite that fails.
    let _ = disk.write(0, &noise(1 << 40, BLOCK as usize), &mut scratch);
    let mut back = vec![0; BLOCK as usize];
    for block in 1..written {
        disk.read(block * BLOCK, &mut back, &mut scratch)
            .expect("it is there");
        assert!(back == noise(block, BLOCK as usize), "block {block}");
    }
    // A discard makes room at once, though a worker frees what it dropped.
    disk.discard(0, 4 << 20).expect("it is inside");
    for block in 0..512 {
        let data = noise(block, BLOCK as usize);
        disk.write(block * BLOCK, &data, &mut scratch)
            .expect("there is room");
    }
}

#[test]
fn zeros_and_words_take_next_to_nothing() {
    let disk = disk(1 << 30, 64 << 20);
    let mut scratch = Scratch::new();
    let before = disk.used_bytes();
    for offset in (0..64 << 20).step_by(1 << 20) {
        disk.write(offset, &vec![0; 1 << 20], &mut scratch)
            .expect("there is room");
    }
    disk.zero(64 << 20, 64 << 20, true, &mut scratch)
        .expect("there is room");
    let zeros = disk.used_bytes() - before;
    // A leaf for each 2 MiB, and a region.
    assert!(zeros < 256 << 10, "{zeros}");
    let extent = disk.extent(0, 4096);
    assert!(extent.zero && !extent.hole, "{extent:?}");
    for offset in (0..64 << 20).step_by(1 << 20) {
        disk.write(offset, &vec![7; 1 << 20], &mut scratch)
            .expect("there is room");
    }
    let words = disk.used_bytes() - before;
    assert!(words < 1 << 20, "{words}");
    assert_eq!(disk.usage().same_filled_blocks, 16384);
}

#[test]
fn requests_outside_and_impossible_sizes_are_refused() {
    let disk = disk(1 << 20, 8 << 20);
    let mut scratch = Scratch::new();
    let mut byte = [0];
    for offset in [1 << 20, u64::MAX] {
        assert_eq!(
            disk.read(offset, &mut byte, &mut scratch),
            Err(DiskError::OutOfRange)
        );
        assert_eq!(
            disk.write(offset, &byte, &mut scratch),
            Err(DiskError::OutOfRange)
        );
        assert_eq!(disk.discard(offset, 1), Err(DiskError::OutOfRange));
        assert_eq!(
            disk.zero(offset, 1, false, &mut scratch),
            Err(DiskError::OutOfRange)
        );
    }
    assert_eq!(disk.discard(1, u64::MAX), Err(DiskError::OutOfRange));
    for size in [0, 4095, 2 << 50] {
        let space = SwapSpace::new(
            HeapSource::new(),
            SwapConfig {
                pool_capacity_pages: 64,
                max_slots: 64,
                ..SwapConfig::default()
            },
        );
        let refused = Disk::new(space.expect("a swap space"), size, 1 << 20);
        assert_eq!(refused.err(), Some(NewDiskError::Size));
    }
}

#[test]
fn threads_share_a_disk() {
    const THREADS: u64 = 4;
    let disk = disk(16 << 20, 1 << 30);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = &disk;
            scope.spawn(move || {
                let mut scratch = Scratch::new();
                let mut random = memfold_testing::Random::new(thread);
                // Each thread's blocks lie between those of others.
                let mut versions = vec![0_u64; 1024];
                for _ in 0..4000 {
                    let index = random.below(versions.len());
                    let offset = (index as u64 * THREADS + thread) * BLOCK;
                    if random.below(50) == 0 {
                        // Of all threads: a leaf is discarded and written again by its owners only.
                        disk.discard(offset, BLOCK).expect("it is inside");
                        versions[index] = 0;
                    } else if random.below(2) == 0 {
                        versions[index] += 1;
                        let mut data = vec![0; BLOCK as usize];
                        data[..8].copy_from_slice(&versions[index].to_le_bytes());
                        data[8..16].copy_from_slice(&thread.to_le_bytes());
                        disk.write(offset, &data, &mut scratch)
                            .expect("there is room");
                    }
                    let mut word = [0; 8];
                    disk.read(offset, &mut word, &mut scratch)
                        .expect("it is there");
                    assert_eq!(u64::from_le_bytes(word), versions[index]);
                }
            });
        }
    });
}
