//! Reads, writes and discards of byte ranges.

use crate::block_map::{Block, BlockMap, LEAF_BLOCKS, Leaf};
use crate::discard::Discarder;
use crate::error::{DiskError, NewDiskError};
use crate::usage::{Counters, DiskUsage, add};
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot, StoreError, SwapSpace, fill_word};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zsmalloc::PageSource;

/// Bytes of a block.
pub const BLOCK: u64 = PAGE_SIZE as u64;
/// Bytes of the largest disk.
pub const MAX_SIZE: u64 = 1 << 50;
/// Blocks read under one lock of a leaf, or stored in one batch. More makes fewer steps; fewer lets
/// writers of neighbouring blocks wait for less.
const BATCH: u64 = 32;
/// Bytes written back to the file for one step of a writer that finds no room.
const WRITE_BACK_BYTES: u64 = 1 << 20;
/// Bytes that a new leaf of the map may take, with its share of a new region.
const LEAF_BYTES: u64 = 1 << 14;

/// A disk. Any number of threads may use it.
///
/// Requests of several threads on one block take effect one after the other. A request on several blocks
/// is not atomic, as on other disks.
pub struct Disk<S: PageSource + 'static> {
    space: Arc<SwapSpace<S>>,
    map: BlockMap,
    discarder: Discarder<S>,
    size: u64,
    limit: u64,
    counters: Counters,
}

impl<S: PageSource + 'static> std::fmt::Debug for Disk<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk")
            .field("usage", &self.usage())
            .finish()
    }
}

/// Consecutive bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Number of bytes.
    pub length: u64,
    /// Never written, or discarded.
    pub hole: bool,
    /// Reads as zeros.
    pub zero: bool,
}

/// A part of a byte range that lies in one block.
struct Part {
    block: u64,
    /// Bytes of the block.
    within: Range<usize>,
    /// Bytes of the request.
    of_request: Range<usize>,
}

impl<S: PageSource + 'static> Disk<S> {
    /// A disk of `size` bytes, all zero, whose memory (pool, tables and map) stays below `limit` bytes.
    ///
    /// # Errors
    ///
    /// If the size is not a multiple of [`BLOCK`] from one block to [`MAX_SIZE`], or a thread cannot be
    /// started.
    pub fn new(space: SwapSpace<S>, size: u64, limit: u64) -> Result<Self, NewDiskError> {
        if size == 0 || size > MAX_SIZE || !size.is_multiple_of(BLOCK) {
            return Err(NewDiskError::Size);
        }
        let space = Arc::new(space);
        let discarder = Discarder::new(space.clone()).map_err(|_| NewDiskError::Thread)?;
        Ok(Disk {
            map: BlockMap::new(size / BLOCK),
            discarder,
            space,
            size,
            limit,
            counters: Counters::default(),
        })
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Checks that a range lies in the disk.
    ///
    /// # Errors
    ///
    /// [`DiskError::OutOfRange`].
    pub fn check(&self, offset: u64, length: u64) -> Result<Range<u64>, DiskError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(offset..end),
            _ => Err(DiskError::OutOfRange),
        }
    }

    /// Reads bytes.
    ///
    /// # Errors
    ///
    /// If the range is not inside the disk, or a block cannot be read back. `out` is unspecified then.
    pub fn read(
        &self,
        offset: u64,
        out: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        self.check(offset, out.len() as u64)?;
        let result = self.read_checked(offset, out, scratch);
        add(&self.counters.reads, 1);
        match result {
            Ok(()) => add(&self.counters.read_bytes, out.len() as u64),
            Err(_) => add(&self.counters.failed_reads, 1),
        }
        result
    }

    fn read_checked(
        &self,
        offset: u64,
        mut out: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        let mut offset = offset;
        while !out.is_empty() {
            let block = offset / BLOCK;
            let end = (block / BATCH + 1) * BATCH * BLOCK;
            let length = (out.len() as u64).min(end - offset) as usize;
            let (now, later) = std::mem::take(&mut out).split_at_mut(length);
            match self.map.read(block / LEAF_BLOCKS) {
                Some(leaf) if leaf.is_some() => {
                    let leaf = leaf.as_deref().expect("looked at before");
                    for part in parts(offset, length) {
                        let out = &mut now[part.of_request];
                        let index = (part.block % LEAF_BLOCKS) as usize;
                        self.read_block(leaf.get(index), part.within, out, scratch)?;
                    }
                }
                _ => now.fill(0),
            }
            out = later;
            offset += length as u64;
        }
        Ok(())
    }

    /// Reads a part of a block. The leaf is locked, which keeps the slot.
    fn read_block(
        &self,
        block: Block,
        within: Range<usize>,
        out: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        let Block::Stored(slot) = block else {
            out.fill(0);
            return Ok(());
        };
        if let Ok(page) = <&mut Page>::try_from(&mut *out) {
            return Ok(self.space.load(slot, page, scratch)?);
        }
        let mut page = [0; PAGE_SIZE];
        self.space.load(slot, &mut page, scratch)?;
        out.copy_from_slice(&page[within]);
        Ok(())
    }

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
        if !self.make_room(LEAF_BYTES, scratch) {
            return Err(DiskError::NoSpace);
        }
        let mut stored = Vec::with_capacity(to_store.len());
        self.store(&to_store, scratch, &mut stored);
        let mut stored = stored.into_iter();
        let (mut before, mut result) = (Vec::new(), Ok(()));
        {
            let mut place = self.map.write(leaf);
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
        self.space.release_bulk(&before);
        result
    }

    /// Writes a part of a block: reads the rest of it, under the lock of its leaf.
    fn write_part(
        &self,
        part: &Part,
        bytes: &[u8],
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        if !self.make_room(LEAF_BYTES, scratch) {
            return Err(DiskError::NoSpace);
        }
        let before = {
            let mut place = self.map.write(part.block / LEAF_BLOCKS);
            let leaf = self.leaf(&mut place);
            let index = (part.block % LEAF_BLOCKS) as usize;
            let mut page = [0; PAGE_SIZE];
            self.read_block(leaf.get(index), 0..PAGE_SIZE, &mut page, scratch)?;
            page[part.within.clone()].copy_from_slice(bytes);
            let block = if fill_word(&page) == Some(0) {
                Block::Zero
            } else {
                let mut stored = Vec::new();
                self.store(&[&page], scratch, &mut stored);
                let slot = stored.pop().expect("one outcome");
                Block::Stored(slot.map_err(|_| DiskError::NoSpace)?)
            };
            leaf.replace(index, block)
        };
        before.into_iter().for_each(|slot| self.space.release(slot));
        Ok(())
    }

    fn leaf<'a>(&self, place: &'a mut Option<Box<Leaf>>) -> &'a mut Leaf {
        place.get_or_insert_with(|| {
            self.map.note_leaves(1);
            Leaf::new()
        })
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
        let bytes = (pages.len() * PAGE_SIZE) as u64;
        if !self.make_room(bytes, scratch) {
            stored.extend(pages.iter().map(|_| Err(StoreError::NoTier)));
            return;
        }
        self.space.store_batch(pages, scratch, stored);
        self.counters
            .peak_bytes
            .fetch_max(self.used_bytes(), Ordering::Relaxed);
        for (outcome, page) in stored.iter_mut().zip(pages) {
            if outcome.is_err() && self.discarder.flush() {
                *outcome = self.space.store(page, scratch);
            }
        }
    }

    /// Whether `bytes` more fit, however badly they compress. Discarded blocks are freed, and pages are
    /// written back to the file, until they do.
    fn make_room(&self, bytes: u64, scratch: &mut Scratch) -> bool {
        let fits = || self.used_bytes() + bytes <= self.limit;
        if fits() || self.discarder.flush() && fits() {
            return true;
        }
        loop {
            let report = self.space.write_back(WRITE_BACK_BYTES.max(bytes), scratch);
            self.space.compact(|| true);
            self.space.trim();
            if fits() {
                return true;
            }
            if report.bytes_before == 0 || report.store_error.is_some() {
                return false;
            }
        }
    }

    /// Makes bytes of the range zero. Whole blocks become holes; with `keep`, blocks of zeros, of which the
    /// map alone takes memory.
    ///
    /// # Errors
    ///
    /// If the range is not inside the disk; if a block that is zeroed in part can neither be read nor
    /// stored; if there is no room for the map.
    pub fn zero(
        &self,
        offset: u64,
        length: u64,
        keep: bool,
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        let range = self.check(offset, length)?;
        let blocks = range.start.div_ceil(BLOCK)..range.end / BLOCK;
        let leaves = length / (LEAF_BLOCKS * BLOCK) + 2;
        if keep && !self.make_room(leaves * LEAF_BYTES, scratch) {
            add(&self.counters.failed_writes, 1);
            return Err(DiskError::NoSpace);
        }
        let mut edges = Vec::new();
        if blocks.start > blocks.end {
            // All of it lies in one block.
            edges.push(range);
        } else {
            edges.push(range.start..blocks.start * BLOCK);
            edges.push(blocks.end * BLOCK..range.end);
            self.zero_blocks(blocks, if keep { Block::Zero } else { Block::Hole });
        }
        let zeros = [0; PAGE_SIZE];
        let mut result = Ok(());
        for edge in edges {
            for part in parts(edge.start, (edge.end - edge.start) as usize) {
                let zeros = &zeros[part.within.clone()];
                result = result.and(self.write_part(&part, zeros, scratch));
            }
        }
        add(&self.counters.discards, 1);
        match result {
            Ok(()) => add(&self.counters.discarded_bytes, length),
            Err(_) => add(&self.counters.failed_writes, 1),
        }
        result
    }

    /// Makes the whole blocks of a range holes; what is left of others stays.
    ///
    /// # Errors
    ///
    /// If the range is not inside the disk.
    pub fn discard(&self, offset: u64, length: u64) -> Result<(), DiskError> {
        let range = self.check(offset, length)?;
        self.zero_blocks(range.start.div_ceil(BLOCK)..range.end / BLOCK, Block::Hole);
        add(&self.counters.discards, 1);
        add(&self.counters.discarded_bytes, length);
        Ok(())
    }

    /// Sets whole blocks to zeros.
    fn zero_blocks(&self, blocks: Range<u64>, to: Block) {
        let (mut discarded, mut slots) = (Vec::new(), Vec::new());
        let mut block = blocks.start;
        while block < blocks.end {
            let number = block / LEAF_BLOCKS;
            let missing = self.map.holes_from(number);
            if to == Block::Hole && missing > 0 {
                block = (number + missing) * LEAF_BLOCKS;
                continue;
            }
            let end = blocks.end.min((number + 1) * LEAF_BLOCKS);
            let is_whole = block.is_multiple_of(LEAF_BLOCKS) && end - block == LEAF_BLOCKS;
            let mut place = if to == Block::Hole {
                self.map.write_existing(number)
            } else {
                Some(self.map.write(number))
            };
            if let Some(place) = place.as_mut() {
                if is_whole {
                    discarded.extend(place.take());
                }
                if to != Block::Hole || place.is_some() {
                    let leaf = self.leaf(place);
                    for block in block..end {
                        slots.extend(leaf.replace((block % LEAF_BLOCKS) as usize, to));
                    }
                }
            }
            block = end;
        }
        self.map.note_leaves(-(discarded.len() as i64));
        self.discarder.discard(discarded);
        self.space.release_bulk(&slots);
    }

    /// The extent at an offset, at most up to `end`. Extents end at multiples of 2 MiB where that is
    /// quicker to tell; neighbours may be of one kind.
    pub fn extent(&self, offset: u64, end: u64) -> Extent {
        let first = offset / BLOCK;
        let number = first / LEAF_BLOCKS;
        let missing = self.map.holes_from(number);
        let kind = |block: Block| (block == Block::Hole, !matches!(block, Block::Stored(_)));
        let until = |block: u64| (block * BLOCK).min(end) - offset;
        let hole = |block: u64| Extent {
            length: until(block),
            hole: true,
            zero: true,
        };
        if missing > 0 {
            return hole((number + missing) * LEAF_BLOCKS);
        }
        let guard = self.map.read(number);
        let Some(leaf) = guard.as_ref().and_then(|leaf| leaf.as_deref()) else {
            return hole((number + 1) * LEAF_BLOCKS);
        };
        let of = |block: u64| kind(leaf.get((block % LEAF_BLOCKS) as usize));
        let (hole, zero) = of(first);
        let last =
            (first..(number + 1) * LEAF_BLOCKS).take_while(|block| of(*block) == (hole, zero));
        Extent {
            length: until(first + last.count() as u64),
            hole,
            zero,
        }
    }

    /// Bytes of memory in use: pool, tables and map.
    pub fn used_bytes(&self) -> u64 {
        self.space.pool_bytes() + self.space.metadata_bytes() + self.map.bytes()
    }

    /// Frees everything that was discarded before the call.
    pub fn settle_discards(&self) {
        self.discarder.flush();
    }

    /// Statistics.
    pub fn usage(&self) -> DiskUsage {
        let space = self.space.usage();
        let counters = &self.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let used_bytes = self.used_bytes();
        DiskUsage {
            size_bytes: self.size,
            limit_bytes: self.limit,
            used_bytes,
            peak_bytes: get(&counters.peak_bytes).max(used_bytes),
            original_bytes: space.original_bytes,
            stored_bytes: space.stored_bytes,
            same_filled_blocks: space.same_filled_pages,
            incompressible_blocks: space.incompressible_pages,
            file_blocks: space.file_pages,
            file_bytes: space.file_bytes,
            read_bytes: get(&counters.read_bytes),
            written_bytes: get(&counters.written_bytes),
            discarded_bytes: get(&counters.discarded_bytes),
            reads: get(&counters.reads),
            writes: get(&counters.writes),
            discards: get(&counters.discards),
            failed_reads: get(&counters.failed_reads),
            failed_writes: get(&counters.failed_writes),
            discard_backlog_blocks: self.discarder.backlog(),
        }
    }
}

/// The parts of a request, by blocks.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = Part> {
    let end = offset + length as u64;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let block = at / BLOCK;
        let until = end.min((block + 1) * BLOCK);
        let part = Part {
            block,
            within: (at - block * BLOCK) as usize..(until - block * BLOCK) as usize,
            of_request: (at - offset) as usize..(until - offset) as usize,
        };
        at = until;
        Some(part)
    })
}
