//! A disk with a swap file: swapoff, and writers that wait for the file.

mod common;
mod memory_file;

use common::{disk, noise, wait_until};
use memfold_disk::{BLOCK, Disk, DiskError, SwapOffError};
use memfold_swap::{
    FileTier, ModelFault, ModelStore, RemoteConfig, RemoteTier, Scratch, SwapConfig, SwapSpace,
    TierKey,
};
use memory_file::{MemoryFile, disk_with, write_noise};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use zsmalloc::HeapSource;

const MIB: u64 = 1 << 20;

/// A disk of 64 MiB in 16 MiB of memory, and a file.
fn disk_with_file() -> Disk<HeapSource> {
    disk_with(MemoryFile::default())
}

fn assert_noise(disk: &Disk<HeapSource>, mebibytes: std::ops::Range<u64>, scratch: &mut Scratch) {
    let mut back = vec![0; MIB as usize];
    for number in mebibytes {
        disk.read(number * MIB, &mut back, scratch)
            .expect("it is there");
        assert!(back == noise(number, MIB as usize), "MiB {number}");
    }
}

#[test]
fn a_swapoff_brings_blocks_back_or_leaves_the_file_in_use() {
    let mut scratch = Scratch::new();
    assert_eq!(disk(MIB, MIB).swap_off(), Err(SwapOffError::NoFile));
    let disk = disk_with_file();
    write_noise(&disk, 0..40, &mut scratch);
    let in_file = disk.usage().file_blocks;
    assert!(in_file > 24 * 256, "{in_file}");
    let refused = disk.swap_off().expect_err("it does not fit");
    assert!(
        matches!(refused, SwapOffError::NoRoom { blocks } if blocks > 20 * 256),
        "{refused}"
    );
    assert!(
        disk.usage().peak_bytes <= disk.limit(),
        "{:?}",
        disk.usage()
    );
    // The file takes blocks as before.
    write_noise(&disk, 40..48, &mut scratch);
    assert_noise(&disk, 0..48, &mut scratch);
    // Once the rest is discarded, it fits.
    disk.discard(0, 40 * MIB).expect("it is inside");
    disk.settle_discards();
    let in_file = disk.usage().file_blocks;
    assert_eq!(disk.swap_off(), Ok(in_file));
    assert_eq!(disk.usage().file_blocks, 0);
    assert_noise(&disk, 40..48, &mut scratch);
    assert_eq!(disk.swap_off(), Ok(0));
    // And no block goes to the file any more.
    let data = noise(0, 32 * MIB as usize);
    assert_eq!(disk.write(0, &data, &mut scratch), Err(DiskError::NoSpace));
    assert_eq!(disk.usage().file_blocks, 0);
    // Nor after another swapoff, for which there is no room at the limit.
    assert_eq!(disk.swap_off(), Ok(0));
    assert_eq!(disk.write(0, &data, &mut scratch), Err(DiskError::NoSpace));
    assert_eq!(disk.usage().file_blocks, 0);
}

/// Writers wait for it, and the end of the disk for them.
#[test]
fn a_swapoff_stops_where_the_disk_ends() {
    let mut scratch = Scratch::new();
    let disk = disk_with_file();
    write_noise(&disk, 0..40, &mut scratch);
    disk.discard(10 * MIB, 30 * MIB).expect("it is inside");
    disk.settle_discards();
    assert!(disk.usage().file_blocks > 0);
    disk.end_waits();
    let refused = disk.swap_off().expect_err("it is not begun");
    assert!(matches!(refused, SwapOffError::NoRoom { .. }), "{refused}");
    assert_noise(&disk, 0..10, &mut scratch);
}

#[test]
fn writers_beside_a_swapoff_that_fails_find_room() {
    let disk = disk_with_file();
    write_noise(&disk, 0..40, &mut Scratch::new());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut scratch = Scratch::new();
            for _ in 0..3 {
                write_noise(&disk, 8..40, &mut scratch);
            }
        });
        while !writer.is_finished() {
            let refused = disk.swap_off().expect_err("it does not fit");
            assert!(matches!(refused, SwapOffError::NoRoom { .. }), "{refused}");
        }
    });
    assert_noise(&disk, 0..40, &mut Scratch::new());
    assert_eq!(disk.usage().failed_writes, 0);
    assert!(
        disk.usage().peak_bytes <= disk.limit(),
        "{:?}",
        disk.usage()
    );
}

#[test]
fn reads_go_on_beside_a_write_of_a_part_that_waits_for_room() {
    const PART: usize = BLOCK as usize - 1;
    let file = MemoryFile::default();
    let disk = &disk_with(file.clone());
    write_noise(disk, 0..40, &mut Scratch::new());
    let (first, written) = (40 * 256, AtomicU64::new(0));
    let held = file.writes.write().expect("no panic");
    std::thread::scope(|scope| {
        // Blocks of 4 KiB until there is just room for what else the write may need.
        scope.spawn(|| {
            let mut scratch = Scratch::new();
            for block in first..first + 2048 {
                disk.write(block * BLOCK, &noise(block, PART), &mut scratch)
                    .expect("the file has room");
                written.fetch_add(1, Ordering::SeqCst);
            }
        });
        let mut before = u64::MAX;
        wait_until("the write waits", || {
            std::thread::sleep(Duration::from_millis(300));
            let now = written.load(Ordering::SeqCst);
            now > 0 && std::mem::replace(&mut before, now) == now
        });
        let block = first + before - 1;
        let reader = scope.spawn(move || {
            let mut back = vec![0; PART];
            let read = disk.read(block * BLOCK, &mut back, &mut Scratch::new());
            (read, back == noise(block, PART))
        });
        let began = Instant::now();
        while !reader.is_finished() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let has_read = reader.is_finished();
        drop(held);
        assert_eq!(reader.join().expect("no panic"), (Ok(()), true));
        assert!(has_read, "a read of the same 2 MiB waited for room");
    });
}

/// Its blocks are copies of those in the store, which is preferred. Once it is switched off, a store that does not answer for a
/// moment is waited for as without it.
#[test]
fn writers_wait_for_the_store_whose_file_of_copies_is_switched_off() {
    let mut scratch = Scratch::new();
    let store = ModelStore::new(None);
    let key = TierKey::new([7; 32]);
    let tier = RemoteTier::new(Box::new(store.clone()), &key, RemoteConfig::default());
    let tier = Arc::new(tier);
    let file = FileTier::new(Box::new(MemoryFile::default()), 128 << 20, &key, 1);
    let file = Arc::new(file.expect("a file"));
    let config = SwapConfig {
        pool_capacity_pages: 1 << 12,
        max_slots: 1 << 16,
        ..SwapConfig::default()
    };
    let mut space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    space.add_tier(Box::new(tier.clone())).expect("a tier");
    tier.keep_copies_in(file.clone());
    space.prefer_remote();
    let mut disk = Disk::with_file(space, file, 64 << 20, 16 << 20).expect("a disk");
    disk.wait_for(tier);
    write_noise(&disk, 0..24, &mut scratch);
    assert!(disk.usage().remote_blocks > 0);
    disk.swap_off().expect("all is in the store");
    store.arm(ModelFault::PutLost, u64::MAX);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_noise(&disk, 24..48, &mut Scratch::new()));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!writer.is_finished(), "there is no room without the store");
        store.disarm();
        writer.join().expect("there is room");
    });
    assert_noise(&disk, 0..48, &mut scratch);
}
