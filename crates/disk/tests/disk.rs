//! The disk against an oracle, its limit, and what it counts.

mod common;
mod packing;

use common::{disk, noise, wait_until};
use memfold_disk::{BLOCK, Disk, DiskError, Host, NewDiskError};
use memfold_swap::{BlockShape, Scratch, SwapConfig, SwapSpace};
use packing::{disk_of_blocks, packing_disk, related};
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use zsmalloc::{HeapSource, PageRun, PageSource, SourceError};

/// A host that cannot tell: the thread that packs ends at once.
struct Unknown;

impl Host for Unknown {
    fn is_idle(&mut self) -> Option<bool> {
        None
    }
}

#[derive(Debug, Clone)]
enum Request {
    Write(u64, usize, u8),
    /// Different bytes, which do not compress.
    Noise(u64, usize),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Read(u64, usize),
    /// Related blocks from this one on.
    Related(u64, u64),
    /// Long enough for the thread that packs to look at all.
    Wait,
}

const SIZE: u64 = 5 << 20;

fn request() -> impl Strategy<Value = Request> {
    let offset = prop_oneof![0..SIZE, (0..SIZE / BLOCK).prop_map(|block| block * BLOCK)];
    let length = prop_oneof![
        1..3 * BLOCK,
        (1..80_u64).prop_map(|blocks| blocks * BLOCK),
        Just(4 << 20)
    ];
    (offset, length, any::<u8>(), 0..9_u32).prop_map(|(offset, length, byte, kind)| {
        let length = length.min(SIZE - offset);
        match kind {
            0 => Request::Write(offset, length as usize, byte),
            1 => Request::Noise(offset, length as usize),
            2 => Request::Zero(offset, length, byte.is_multiple_of(2)),
            3 => Request::Discard(offset, length),
            4 | 5 => Request::Related(offset / BLOCK, length / BLOCK),
            6 => Request::Wait,
            _ => Request::Read(offset, length as usize),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reads_see_the_last_write(
        requests in proptest::collection::vec(request(), 1..40),
        packs in any::<bool>(),
    ) {
        let disk = if packs { packing_disk(SIZE, 1 << 30) } else { disk(SIZE, 1 << 30) };
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
                Request::Related(first, blocks) => {
                    let data: Vec<u8> = (first..first + blocks).flat_map(related).collect();
                    disk.write(first * BLOCK, &data, &mut scratch).expect("there is room");
                    expected[(first * BLOCK) as usize..][..data.len()].copy_from_slice(&data);
                }
                Request::Wait => {
                    if packs {
                        std::thread::sleep(Duration::from_millis(250));
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
        // (What moves meanwhile is freed once it has moved.)
        wait_until("nothing is left", || disk.usage().original_bytes == 0);
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

fn write_related(disk: &Disk<HeapSource>, blocks: std::ops::Range<u64>) {
    let mut scratch = Scratch::new();
    for block in blocks {
        disk.write(block * BLOCK, &related(block), &mut scratch)
            .expect("there is room");
    }
}

#[track_caller]
fn assert_related(disk: &Disk<HeapSource>, blocks: impl Iterator<Item = u64>) {
    assert_holds(disk, blocks, related);
}

#[track_caller]
fn assert_holds(
    disk: &Disk<HeapSource>,
    blocks: impl Iterator<Item = u64>,
    contents: impl Fn(u64) -> Vec<u8>,
) {
    let (mut scratch, mut back) = (Scratch::new(), vec![0; BLOCK as usize]);
    for block in blocks {
        disk.read(block * BLOCK, &mut back, &mut scratch)
            .expect("it is there");
        assert!(back == contents(block), "block {block}");
    }
}

/// Waits until no more is packed: several passes, of which the first only makes blocks old.
fn wait_until_stable(disk: &Disk<HeapSource>) {
    wait_until("no more are packed", || {
        let before = disk.usage().packed_blocks;
        std::thread::sleep(Duration::from_millis(700));
        disk.usage().packed_blocks == before
    });
}

#[test]
fn cold_blocks_are_packed_and_hot_ones_stored_alone_again() {
    let disk = packing_disk(16 << 20, 1 << 30);
    write_related(&disk, 0..4096);
    // Some were packed while the others were written: so another disk, which does not pack.
    let alone = {
        let disk = self::disk(16 << 20, 1 << 30);
        write_related(&disk, 0..4096);
        disk.used_bytes()
    };
    // One whose neighbours were packed earlier stays alone: more of them, the slower the writes were.
    wait_until("most are packed", || disk.usage().packed_blocks > 3500);
    wait_until("memory is given back", || disk.used_bytes() < alone * 3 / 4);
    // What is read again and again is not packed for long, whatever the thread does meanwhile.
    let is_unpacked = |number: u64| {
        // Those that are packed meanwhile would hide those that are unpacked.
        wait_until_stable(&disk);
        let (before, began) = (disk.usage().packed_blocks, Instant::now());
        while began.elapsed() < Duration::from_secs(5) {
            assert_related(&disk, number * 8..number * 8 + 8);
            if disk.usage().packed_blocks + 8 <= before {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    };
    // Without a CPU, the thread that packs seems to have ended.
    let is_any_unpacked = (1..5).any(is_unpacked);
    assert!(is_any_unpacked, "eight blocks are unpacked");
    assert_related(&disk, 0..4096);
    // Discards and overwrites of some of the neighbours.
    wait_until_stable(&disk);
    for block in (0..4096).step_by(2) {
        disk.discard(block * BLOCK, BLOCK).expect("it is inside");
    }
    assert_related(&disk, (1..4096).step_by(2));
    wait_until("blocks that are half gone are packed anew", || {
        let usage = disk.usage();
        usage.dead_bytes * 5 < usage.stored_bytes && usage.packed_blocks > 1000
    });
    assert_related(&disk, (1..4096).step_by(2));
    disk.discard(0, 16 << 20).expect("it is inside");
    disk.settle_discards();
    wait_until("nothing is left", || disk.usage().stored_bytes == 0);
    assert_eq!(disk.usage().dead_bytes, 0);
}

#[test]
fn a_write_without_room_packs_what_is_there() {
    let fit = |packs: bool| {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 14,
            max_slots: 1 << 16,
            blocks_for_room: BlockShape { pages: 8, level: 1 },
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
        let mut disk = Disk::new(space, 64 << 20, 8 << 20).expect("a disk");
        if packs {
            disk.pack(Duration::from_secs(3600), Unknown)
                .expect("a thread");
        }
        let (mut scratch, mut written) = (Scratch::new(), 0);
        while disk
            .write(written * BLOCK, &related(written), &mut scratch)
            .is_ok()
        {
            written += 1;
        }
        assert_related(&disk, 0..written);
        // Overwrites leave gaps in what is packed, which are found as well.
        for round in 0..4 {
            for block in (round..written).step_by(4) {
                match disk.write(block * BLOCK, &related(block), &mut scratch) {
                    Ok(()) | Err(DiskError::NoSpace) => {}
                    Err(other) => panic!("{other}"),
                }
            }
        }
        assert_related(&disk, 0..written);
        let usage = disk.usage();
        assert!(usage.peak_bytes <= usage.limit_bytes, "{usage:?}");
        (written, usage)
    };
    let ((alone, _), (packed, usage)) = (fit(false), fit(true));
    assert!(
        packed > alone * 3 / 2,
        "{alone} and {packed} blocks fit: {usage:?}"
    );
}

/// Blocks that have little in common: each takes 2 KiB in a block with its neighbours, and 3 KiB alone.
fn akin(seed: u64) -> Vec<u8> {
    let mut data = noise(seed, BLOCK as usize);
    data[..1024].copy_from_slice(&noise(!(seed / 8), 1024));
    data[3072..].fill(0);
    data
}

/// Discards the first of each eight blocks, and frees them.
fn discard_first(disk: &Disk<HeapSource>, of_each_8: u64, blocks: u64) {
    for block in (0..blocks).filter(|block| block % 8 < of_each_8) {
        disk.discard(block * BLOCK, BLOCK).expect("it is inside");
    }
    disk.settle_discards();
}

#[test]
fn discards_give_a_full_disk_room_after_a_search_in_vain() {
    let mut disk = disk_of_blocks(1 << 30, 8 << 20);
    disk.pack(Duration::from_secs(3600), Unknown)
        .expect("a thread");
    let (mut scratch, mut written, mut failed) = (Scratch::new(), 0, 0);
    while failed < 8 {
        match disk.write(written * BLOCK, &akin(written), &mut scratch) {
            Ok(()) => written += 1,
            Err(DiskError::NoSpace) => failed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    // No block is empty, so only taking them apart gives memory back.
    discard_first(&disk, 3, written);
    let before = disk.usage();
    let again = (0..written).filter(|block| block % 8 == 0);
    for block in again.clone() {
        let wrote = disk.write(block * BLOCK, &akin(block), &mut scratch);
        assert_eq!(wrote, Ok(()), "{before:?} {:?}", disk.usage());
    }
    let kept = (0..written).filter(|block| block % 8 > 2);
    assert_holds(&disk, again.chain(kept), akin);
    assert!(disk.usage().peak_bytes <= disk.limit());
}

/// A disk on which discards have just left all packed blocks half empty.
fn half_empty_disk() -> Disk<HeapSource> {
    let disk = packing_disk(16 << 20, 1 << 30);
    let mut scratch = Scratch::new();
    for block in 0..2048 {
        disk.write(block * BLOCK, &akin(block), &mut scratch)
            .expect("there is room");
    }
    let packed = || disk.usage().packed_blocks;
    wait_until("blocks are packed", || packed() > 1800);
    // Passes end where nothing moves any more.
    let mut before = 0;
    wait_until("it is quiet", || {
        std::thread::sleep(Duration::from_secs(1));
        std::mem::replace(&mut before, packed()) == packed()
    });
    discard_first(&disk, 5, 2048);
    disk
}

#[test]
fn blocks_that_discards_leave_half_empty_are_taken_apart() {
    // Without a CPU, this thread sees them only once they are taken apart.
    let mut disks = (0..5).map(|_| half_empty_disk());
    let disk = disks.find(|disk| disk.usage().dead_bytes > 1 << 20);
    let disk = disk.expect("one is seen half empty");
    let dead = || disk.usage().dead_bytes;
    wait_until("blocks are taken apart", || dead() < 1 << 18);
    assert_holds(&disk, (0..2048).filter(|block| block % 8 > 4), akin);
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

/// The map of blocks that are gone would fill the limit of an empty disk.
#[test]
fn a_part_of_the_map_goes_with_its_last_block() {
    const PART: u64 = 2 << 20;
    let disk = disk(16 << 30, 8 << 20);
    let mut scratch = Scratch::new();
    for offset in (0..disk.size()).step_by(PART as usize) {
        let block = vec![7; BLOCK as usize];
        disk.write(offset, &block, &mut scratch).expect("room");
        disk.discard(offset, BLOCK).expect("it is inside");
    }
    disk.write(0, &vec![0; PART as usize], &mut scratch)
        .expect("there is room");
    let before = disk.used_bytes();
    disk.discard(0, PART / 2).expect("it is inside");
    assert_eq!(disk.used_bytes(), before);
    disk.discard(PART / 2, PART / 2).expect("it is inside");
    assert_eq!(disk.used_bytes(), before - 2048);
    // What is written later has another.
    disk.write(BLOCK, b"data", &mut scratch).expect("room");
    let mut back = [0; 4];
    disk.read(BLOCK, &mut back, &mut scratch).expect("data");
    assert_eq!(&back, b"data");
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
    threads_share(&disk(16 << 20, 1 << 30));
}

#[test]
fn threads_share_a_disk_that_packs() {
    let disk = packing_disk(16 << 20, 1 << 30);
    threads_share(&disk);
    wait_until("some are packed", || disk.usage().packed_blocks > 0);
}

/// They take a few bytes a block, for which no more room is needed.
#[test]
fn zeros_that_are_no_holes_need_little_room() {
    let disk = disk(4 << 30, 16 << 20);
    let mut scratch = Scratch::new();
    let piece = noise(1, 4 << 20);
    disk.write(0, &piece, &mut scratch).expect("there is room");
    disk.zero(8 << 20, (4 << 30) - (8 << 20), true, &mut scratch)
        .expect("there is room");
    let usage = disk.usage();
    assert!(usage.peak_bytes <= usage.limit_bytes, "{usage:?}");
    let mut back = vec![1; 4 << 20];
    disk.read(0, &mut back, &mut scratch).expect("it is there");
    assert!(back == piece);
    disk.read(2 << 30, &mut back, &mut scratch).expect("zeros");
    assert!(back.iter().all(|byte| *byte == 0));
}

/// What others have reserved and do not use is no reason to refuse a write.
#[test]
fn writers_at_once_find_what_room_there_is() {
    const PIECE: usize = 128 << 10;
    let disk = disk(64 << 20, 16 << 20);
    std::thread::scope(|scope| {
        for thread in 0..12 {
            let disk = &disk;
            scope.spawn(move || {
                let mut scratch = Scratch::new();
                // Less than an eighth of the limit in all.
                let piece: Vec<u8> = noise(thread, PIECE / 16).repeat(16);
                for round in 0..200 {
                    let offset = (thread * 4 + round % 4) * PIECE as u64;
                    let written = disk.write(offset, &piece, &mut scratch);
                    assert_eq!(written, Ok(()), "thread {thread}, round {round}");
                }
            });
        }
    });
    assert_eq!(disk.usage().failed_writes, 0);
}

fn threads_share(disk: &Disk<HeapSource>) {
    const THREADS: u64 = 4;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
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

/// A source with a huge page wherever it is asked for one.
#[derive(Default)]
struct HugeSource {
    heap: HeapSource,
    filled: Arc<AtomicU64>,
}

// SAFETY: reservations are those of the inner source, which are resident or may be touched.
unsafe impl PageSource for HugeSource {
    fn reserve(&self, pages: usize) -> Result<NonNull<u8>, SourceError> {
        self.heap.reserve(pages)
    }

    unsafe fn unreserve(&self, base: NonNull<u8>, pages: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.unreserve(base, pages) }
    }

    fn huge_pages(&self) -> usize {
        512
    }

    fn populate_huge(&self, run: PageRun) -> bool {
        self.filled.fetch_add(run.pages as u64 * BLOCK, Relaxed);
        true
    }

    unsafe fn discard(&self, runs: &[PageRun]) -> Result<(), SourceError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.heap.discard(runs) }
    }
}

#[test]
fn huge_pages_stay_below_the_limit() {
    const PIECE: usize = 256 << 10;
    for limit in [64 << 20, 65 << 20, (66 << 20) + 4096] {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 16,
            max_slots: 1 << 16,
            ..SwapConfig::default()
        };
        let source = HugeSource::default();
        let filled = source.filled.clone();
        let space = SwapSpace::new(source, config).expect("a swap space");
        let disk = Disk::new(space, 128 << 20, limit).expect("a disk");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut scratch = Scratch::new();
                    let piece = noise(thread, PIECE);
                    let offsets = (thread * (32 << 20)..).step_by(PIECE);
                    let written = offsets.map(|offset| disk.write(offset, &piece, &mut scratch));
                    let refused = written.take(128).find_map(Result::err);
                    // One may have had all of its share before the others have filled the rest.
                    assert!(matches!(refused, None | Some(DiskError::NoSpace)));
                });
            }
        });
        let usage = disk.usage();
        assert!(usage.peak_bytes <= usage.limit_bytes, "{usage:?}");
        assert!(
            usage.used_bytes + (1 << 20) > usage.limit_bytes,
            "{usage:?}"
        );
        assert!(filled.load(Relaxed) > 0, "no huge page was used");
    }
}
