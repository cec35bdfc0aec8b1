//! What several tests need.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use memfold_testing::Random;

use memfold_swap::{FileBackend, FileTier, PAGE_SIZE, Page, SwapConfig, SwapSpace, TierKey};
use zsmalloc::{HeapSource, PageSource};

/// 64 MiB of pool and 256 MiB of pages.
pub(crate) fn config() -> SwapConfig {
    SwapConfig {
        pool_capacity_pages: 1 << 14,
        max_slots: 1 << 16,
        shards: 2,
        ..Default::default()
    }
}

pub(crate) fn space() -> SwapSpace<HeapSource> {
    SwapSpace::new(HeapSource::new(), config()).unwrap()
}

pub(crate) fn space_with_file(config: SwapConfig, tier: Arc<FileTier>) -> SwapSpace<HeapSource> {
    let mut space = SwapSpace::new(HeapSource::new(), config).unwrap();
    space.add_tier(Box::new(tier)).unwrap();
    space
}

/// Trims a space, in which no page may be left, nor memory but for the records of clusters.
#[track_caller]
pub(crate) fn assert_empty<S: PageSource>(space: &SwapSpace<S>) {
    space.trim();
    let usage = space.usage();
    assert_eq!(
        (
            usage.slots_in_use,
            usage.stored_bytes,
            usage.pool_bytes,
            usage.dead_bytes
        ),
        (0, 0, 0, 0)
    );
    assert!(usage.table_bytes <= PAGE_SIZE as u64, "{usage:?}");
}

/// A file in memory that can be made to fail, and whose contents can be damaged.
#[derive(Clone, Default)]
pub(crate) struct MemoryFile {
    pub contents: Arc<Mutex<Vec<u8>>>,
    /// Writes beyond this many bytes fail, as on a full disk; 0 for no end.
    pub disk: Arc<AtomicU64>,
    /// Reads to come that fail.
    pub bad_reads: Arc<AtomicU64>,
    pub reads: Arc<AtomicU64>,
    pub writes: Arc<AtomicU64>,
}

impl MemoryFile {
    pub(crate) fn tier(&self, bytes: u64) -> Arc<FileTier> {
        let key = TierKey::new([7; 32]);
        Arc::new(FileTier::new(Box::new(self.clone()), bytes, &key, 1).unwrap())
    }
}

impl FileBackend for MemoryFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let bad = |count: u64| count.checked_sub(1);
        if self
            .bad_reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, bad)
            .is_ok()
        {
            return Err(io::Error::other("injected EIO"));
        }
        let contents = self.contents.lock().unwrap();
        let offset = offset as usize;
        let data = contents.get(offset..offset + buffer.len());
        buffer.copy_from_slice(data.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let end = offset as usize + data.len();
        let disk = self.disk.load(Ordering::Relaxed) as usize;
        if disk > 0 && end > disk {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut contents = self.contents.lock().unwrap();
        if contents.len() < end {
            contents.resize(end, 0);
        }
        contents[offset as usize..end].copy_from_slice(data);
        Ok(())
    }
}

fn random_words(seed: u64, page: &mut Page, mut word: impl FnMut(usize, u64) -> u64) {
    let mut random = Random::new(seed);
    for (index, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *bytes = word(index, random.next_word()).to_le_bytes();
    }
}

/// A page that compresses about 2:1 and is different for each `seed`.
pub(crate) fn text(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    random_words(
        seed,
        &mut page,
        |index, random| if index % 2 == 0 { random } else { seed },
    );
    page
}

/// A page that does not compress.
pub(crate) fn noise(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    random_words(seed, &mut page, |_, random| random);
    page
}
