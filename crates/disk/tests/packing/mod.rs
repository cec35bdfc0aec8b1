//! Disks that compress blocks together with their neighbours, and blocks for which that is worth it.
#![allow(
    unreachable_pub,
    reason = "nothing in a test is reachable from outside"
)]

use crate::common::noise;
use memfold_disk::{BLOCK, Disk, Host};
use memfold_swap::{BlockShape, SwapConfig, SwapSpace};
use std::time::Duration;
use zsmalloc::HeapSource;

/// A host whose CPUs are always idle.
struct Idle;

impl Host for Idle {
    fn is_idle(&mut self) -> Option<bool> {
        Some(true)
    }
}

/// A disk that packs at once what is not touched.
pub fn packing_disk(size: u64, limit: u64) -> Disk<HeapSource> {
    let mut disk = disk_of_blocks(size, limit);
    disk.pack(Duration::from_millis(1), Idle).expect("a thread");
    disk
}

/// Blocks of eight pages.
const EIGHT: BlockShape = BlockShape { pages: 8, level: 1 };

/// A disk with blocks of eight pages, without a thread that packs.
pub fn disk_of_blocks(size: u64, limit: u64) -> Disk<HeapSource> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 14,
        max_slots: 1 << 16,
        blocks: EIGHT,
        blocks_for_room: EIGHT,
        block_saving: 32,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    Disk::new(space, size, limit).expect("a disk")
}

/// Related blocks: half of each is its own, the rest as in its neighbours.
pub fn related(seed: u64) -> Vec<u8> {
    let mut data = noise(seed / 8, BLOCK as usize);
    data[..8].copy_from_slice(&seed.to_le_bytes());
    data[64..2048].copy_from_slice(&[seed as u8; 1984]);
    data
}
