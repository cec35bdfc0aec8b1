//! Writes: whole blocks in batches, parts of blocks one by one.

use crate::block_map::{Block, LEAF_BLOCKS, Leaf};
use crate::disk::{BATCH, Disk, Part, parts};
use crate::error::DiskError;
use crate::memory::LEAF_BYTES;
use crate::usage::add;
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot, StoreError, fill_word};
use std::sync::atomic::Ordering;
use zsmalloc::{MAX_CHAIN_PAGES, PageSource};

/// Bytes by which storing a page may enlarge the pool: a zspage of its own.
pub(crate) const MOST_STORED: u64 = (MAX_CHAIN_PAGES * PAGE_SIZE) as u64;

/// What became of a part of a block.
enum Written {
    /// It is written; the block had this slot.
    Replaced(Option<Slot>),
    /// The block keeps what it holds.
    NoRoom,
}

impl<S: PageSource + 'static> Disk<S> {
    /// Writes bytes.
    ///
    /// # Errors
    ///
    /// If the range is not inside the disk; if there is no room; if a block that is written in part cannot
    /// be read. Blocks before that one may have been written.
    pub fn write(&self, offset: u64, data: &[u8], scratch: &mut Scratch) -> Result<(), DiskError> {
        self.check(offset, data.len() as u64)?;
        let mut result = Ok(());
        let mut pages: Vec<(u64, &Page)> = Vec::with_capacity(BATCH as usize);
        for part in parts(offset, data.len()) {
            let bytes = &data[part.of_request.clone()];
            if result.is_err() {
                break;
            }
            match <&Page>::try_from(bytes) {
                Ok(page) => {
                    let starts_batch = part.block.is_multiple_of(BATCH);
                    if starts_batch && !pages.is_empty() {
                        result = self.write_pages(&pages, scratch);
                        pages.clear();
                    }
                    pages.push((part.block, page));
                }
                Err(_) => {
                    result = self
                        .write_pages(&pages, scratch)
                        .and_then(|()| self.write_part(&part, bytes, scratch));
                    pages.clear();
                }
            }
        }
        let result = result.and_then(|()| self.write_pages(&pages, scratch));
        add(&self.counters.writes, 1);
        match result {
            Ok(()) => add(&self.counters.written_bytes, data.len() as u64),
            Err(_) => add(&self.counters.failed_writes, 1),
        }
        result
    }

    /// Writes whole consecutive blocks of one leaf.
    fn write_pages(&self, pages: &[(u64, &Page)], scratch: &mut Scratch) -> Result<(), DiskError> {
        let Some((first, _)) = pages.first() else {
            return Ok(());
        };
        let leaf = first / LEAF_BLOCKS;
        let is_zero = pages.iter().map(|(_, page)| fill_word(page) == Some(0));
        let is_zero: Vec<bool> = is_zero.collect();
        let to_store = pages.iter().zip(&is_zero);
        let to_store: Vec<&Page> = to_store
            .filter_map(|((_, page), is_zero)| (!is_zero).then_some(*page))
            .collect();
        let _leaf = self.memory.reserve(LEAF_BYTES, 0, scratch)?;
        let mut stored = Vec::with_capacity(to_store.len());
        self.store(&to_store, scratch, &mut stored);
        let mut stored = stored.into_iter();
        let (mut before, mut result) = (Vec::new(), Ok(()));
        {
            let mut place = self.memory.map.write(leaf);
            let leaf = self.leaf(&mut place);
            for ((number, _), is_zero) in pages.iter().zip(is_zero) {
                let block = if is_zero {
                    Block::Zero
                } else {
                    match stored.next().expect("one outcome for each page") {
                        Ok(slot) => Block::Stored(slot),
                        Err(_) => {
                            // The block keeps what it holds.
                            result = Err(DiskError::NoSpace);
                            continue;
                        }
                    }
                };
                before.extend(leaf.replace((number % LEAF_BLOCKS) as usize, block));
            }
        }
        self.memory.space.release_bulk(&before);
        result
    }

    /// Writes a part of a block. Room is made before the lock of its leaf is taken: that may wait for the file, a
    /// store or a swapoff, and all requests of 2 MiB would wait with it.
    pub(crate) fn write_part(
        &self,
        part: &Part,
        bytes: &[u8],
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        let _leaf = self.memory.reserve(LEAF_BYTES, 0, scratch)?;
        let mut is_flushed = false;
        // Without it, zeros can be written.
        let mut room = self.memory.try_reserve(MOST_STORED);
        loop {
            match self.try_write_part(part, bytes, room.is_some(), scratch)? {
                Written::Replaced(before) => {
                    before
                        .into_iter()
                        .for_each(|slot| self.memory.space.release(slot));
                    return Ok(());
                }
                Written::NoRoom if room.is_none() => {
                    room = Some(self.memory.reserve(MOST_STORED, LEAF_BYTES, scratch)?);
                }
                // All slots may be in use.
                Written::NoRoom if !is_flushed => {
                    self.memory.discarder.flush();
                    is_flushed = true;
                }
                Written::NoRoom => return Err(DiskError::NoSpace),
            }
        }
    }

    /// The same under the lock of the leaf: reads the rest of the block.
    fn try_write_part(
        &self,
        part: &Part,
        bytes: &[u8],
        has_room: bool,
        scratch: &mut Scratch,
    ) -> Result<Written, DiskError> {
        let mut place = self.memory.map.write(part.block / LEAF_BLOCKS);
        let leaf = self.leaf(&mut place);
        let index = (part.block % LEAF_BLOCKS) as usize;
        let mut page = [0; PAGE_SIZE];
        self.read_block(leaf.get(index), 0..PAGE_SIZE, &mut page, scratch)?;
        page[part.within.clone()].copy_from_slice(bytes);
        let block = if fill_word(&page) == Some(0) {
            Block::Zero
        } else {
            let stored = has_room.then(|| self.memory.space.store(&page, scratch));
            let Some(Ok(slot)) = stored else {
                return Ok(Written::NoRoom);
            };
            self.note_peak();
            Block::Stored(slot)
        };
        Ok(Written::Replaced(leaf.replace(index, block)))
    }

    pub(crate) fn leaf<'a>(&self, place: &'a mut Option<Box<Leaf>>) -> &'a mut Leaf {
        place.get_or_insert_with(|| {
            self.memory.map.note_leaves(1);
            Leaf::new()
        })
    }

    fn note_peak(&self) {
        let used = self.used_bytes();
        self.counters.peak_bytes.fetch_max(used, Ordering::Relaxed);
    }

    /// Stores pages, if there is room for them or room can be made.
    fn store(
        &self,
        pages: &[&Page],
        scratch: &mut Scratch,
        stored: &mut Vec<Result<Slot, StoreError>>,
    ) {
        if pages.is_empty() {
            return;
        }
        let most = (pages.len() as u64) * MOST_STORED;
        if let Some(_room) = self.memory.try_reserve(most) {
            self.memory.space.store_batch(pages, scratch, stored);
            self.note_peak();
        } else {
            for page in pages {
                let Ok(_room) = self.memory.reserve(MOST_STORED, LEAF_BYTES, scratch) else {
                    // The next would wait as long.
                    stored.resize(pages.len(), Err(StoreError::NoTier));
                    break;
                };
                stored.push(self.memory.space.store(page, scratch));
                self.note_peak();
            }
        }
        if stored.iter().all(Result::is_ok) {
            return;
        }
        // All slots may be in use: those of discarded blocks are free then, by this thread or the one that frees them.
        self.memory.discarder.flush();
        for (outcome, page) in stored.iter_mut().zip(pages) {
            if outcome.is_err()
                && let Some(_room) = self.memory.try_reserve(MOST_STORED)
            {
                *outcome = self.memory.space.store(page, scratch);
            }
        }
    }
}
