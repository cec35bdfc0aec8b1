//! A swap file in memory, whose reads and writes a test can hold, and a disk with it.
#![allow(
    unreachable_pub,
    reason = "nothing in a test is reachable from outside"
)]

use crate::common::noise;
use memfold_disk::Disk;
use memfold_swap::{FileBackend, FileTier, Scratch, SwapConfig, SwapSpace, TierKey};
use std::sync::{Arc, Mutex, RwLock};
use zsmalloc::HeapSource;

const MIB: u64 = 1 << 20;

/// A file in memory.
#[derive(Debug, Clone, Default)]
pub struct MemoryFile {
    contents: Arc<Mutex<Vec<u8>>>,
    /// Reads wait while a test holds it.
    pub reads: Arc<RwLock<()>>,
    /// Writes wait while a test holds it.
    pub writes: Arc<RwLock<()>>,
}

impl FileBackend for MemoryFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let _may_read = self.reads.read().expect("no panic");
        let contents = self.contents.lock().expect("no panic");
        let data = contents.get(offset as usize..offset as usize + buffer.len());
        buffer.copy_from_slice(data.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let _may_write = self.writes.read().expect("no panic");
        let mut contents = self.contents.lock().expect("no panic");
        let end = offset as usize + data.len();
        let length = contents.len().max(end);
        contents.resize(length, 0);
        contents[offset as usize..end].copy_from_slice(data);
        Ok(())
    }
}

/// A disk of 64 MiB in 16 MiB of memory, and this file.
pub fn disk_with(file: MemoryFile) -> Disk<HeapSource> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 12,
        max_slots: 1 << 16,
        ..SwapConfig::default()
    };
    let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
    let key = TierKey::new([7; 32]);
    let file = FileTier::new(Box::new(file), 128 << 20, &key, 1).expect("a file");
    Disk::with_file(space, file.into(), 64 << 20, 16 << 20).expect("a disk")
}

pub fn write_noise(
    disk: &Disk<HeapSource>,
    mebibytes: std::ops::Range<u64>,
    scratch: &mut Scratch,
) {
    for number in mebibytes {
        let data = noise(number, MIB as usize);
        disk.write(number * MIB, &data, scratch)
            .expect("there is room");
    }
}
