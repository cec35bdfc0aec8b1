//! Reads and discards of byte ranges.

use crate::block_map::{Block, LEAF_BLOCKS};
use crate::error::{DiskError, NewDiskError, SwapOffError};
use crate::memory::{LEAF_BYTES, Memory};
use crate::packing::Host;
use crate::swap_file::SwapFile;
use crate::swap_off::swap_off;
use crate::unpack::Hot;
use crate::usage::{Counters, DiskUsage, add};
use memfold_swap::{FileTier, PAGE_SIZE, Page, RemoteTier, Scratch, SwapSpace};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use zsmalloc::PageSource;

/// Bytes of a block.
pub const BLOCK: u64 = PAGE_SIZE as u64;
/// Bytes of the largest disk.
pub const MAX_SIZE: u64 = 1 << 50;
/// Blocks read under one lock of a leaf, or stored in one batch. More makes fewer steps; fewer lets
/// writers of neighbouring blocks wait for less.
pub(crate) const BATCH: u64 = 32;
/// Leaves of zeros that are no holes for which room is reserved at a time. More makes fewer steps, and may wait for room
/// that is not needed.
pub(crate) const LEAVES_ZEROED: u64 = 32;

/// A disk. Any number of threads may use it.
///
/// Requests of several threads on one block take effect one after the other. A request on several blocks
/// is not atomic, as on other disks.
pub struct Disk<S: PageSource + 'static> {
    pub(crate) memory: Memory<S>,
    size: u64,
    pub(crate) counters: Counters,
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
pub(crate) struct Part {
    pub(crate) block: u64,
    /// Bytes of the block.
    pub(crate) within: Range<usize>,
    /// Bytes of the request.
    pub(crate) of_request: Range<usize>,
}

impl<S: PageSource + 'static> Disk<S> {
    /// A disk of `size` bytes, all zero, whose memory (pool, tables and map) stays below `limit` bytes.
    ///
    /// # Errors
    ///
    /// If the size is not a multiple of [`BLOCK`] from one block to [`MAX_SIZE`], or a thread cannot be
    /// started.
    pub fn new(space: SwapSpace<S>, size: u64, limit: u64) -> Result<Self, NewDiskError> {
        Self::of(space, None, size, limit)
    }

    /// The same with a file, to which blocks go that were used longest ago where there is no room. The space
    /// must have none yet.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); if the space has a file.
    pub fn with_file(
        mut space: SwapSpace<S>,
        file: Arc<FileTier>,
        size: u64,
        limit: u64,
    ) -> Result<Self, NewDiskError> {
        space
            .add_tier(Box::new(file.clone()))
            .map_err(|_| NewDiskError::File)?;
        Self::of(space, Some(SwapFile::new(file)), size, limit)
    }

    fn of(
        space: SwapSpace<S>,
        file: Option<SwapFile>,
        size: u64,
        limit: u64,
    ) -> Result<Self, NewDiskError> {
        if size == 0 || size > MAX_SIZE || !size.is_multiple_of(BLOCK) {
            return Err(NewDiskError::Size);
        }
        Ok(Disk {
            memory: Memory::new(space, file, size / BLOCK, limit)?,
            size,
            counters: Counters::default(),
        })
    }

    /// Has a thread compress blocks together with neighbours that are neither read nor written for a `period`
    /// to two, sooner where memory is short, while `host` says that CPUs are idle. A write that finds no
    /// room then does the same before it fails.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn pack(&mut self, period: Duration, host: impl Host) -> Result<(), NewDiskError> {
        self.memory.pack(period, host)
    }

    /// Has writes that find no room wait for a store on other machines while it does not answer. It is a tier
    /// of the disk's space.
    pub fn wait_for(&mut self, remote: Arc<RemoteTier>) {
        self.memory.remote = Some(remote);
    }

    /// Ends these waits and those of reads, for good: blocks on other machines cannot be read any more. To be
    /// called before a [`Server`](crate::nbd::Server) is dropped.
    pub fn end_waits(&self) {
        if let Some(remote) = &self.memory.remote {
            remote.end_waits();
        }
        if let Some(file) = &self.memory.file {
            file.end_waits();
        }
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Most bytes of memory that it may take.
    pub fn limit(&self) -> u64 {
        self.memory.limit()
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
            let mut hot = Hot::default();
            let read = self.read_batch(offset, now, &mut hot, scratch);
            self.memory.unpack(hot, scratch);
            read?;
            out = later;
            offset += length as u64;
        }
        Ok(())
    }

    /// Reads a range of one leaf, and tells which of its blocks are to be stored anew.
    fn read_batch(
        &self,
        offset: u64,
        out: &mut [u8],
        hot: &mut Hot,
        scratch: &mut Scratch,
    ) -> Result<(), DiskError> {
        let leaf = self.memory.map.read(offset / BLOCK / LEAF_BLOCKS);
        let Some(leaf) = leaf.as_ref().and_then(|leaf| leaf.as_deref()) else {
            out.fill(0);
            return Ok(());
        };
        let block = |part: &Part| leaf.get((part.block % LEAF_BLOCKS) as usize);
        let slot = |part: Part| match block(&part) {
            Block::Stored(slot) => Some(slot),
            Block::Hole | Block::Zero => None,
        };
        { &self.memory.space }.prefetch(parts(offset, out.len()).filter_map(slot));
        for part in parts(offset, out.len()) {
            let out = &mut out[part.of_request.clone()];
            let packed = self.memory.hot_slot(block(&part));
            self.read_block(block(&part), part.within.clone(), out, scratch)?;
            if let Some(slot) = packed
                && let Ok(page) = <&Page>::try_from(&*out)
            {
                self.memory.note_hot(part.block, slot, page, hot);
            }
        }
        Ok(())
    }

    /// Reads a part of a block. The leaf is locked, which keeps the slot.
    pub(crate) fn read_block(
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
            return Ok(self.memory.space.load(slot, page, scratch)?);
        }
        let mut page = [0; PAGE_SIZE];
        self.memory.space.load(slot, &mut page, scratch)?;
        out.copy_from_slice(&page[within]);
        Ok(())
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
        let mut edges = Vec::new();
        if blocks.start > blocks.end {
            // All of it lies in one block.
            edges.push(range);
        } else {
            edges.push(range.start..blocks.start * BLOCK);
            edges.push(blocks.end * BLOCK..range.end);
            if keep {
                self.keep_zeros(blocks, scratch)
                    .inspect_err(|_| add(&self.counters.failed_writes, 1))?;
            } else {
                self.zero_blocks(blocks, Block::Hole);
            }
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

    /// Makes blocks zeros that are no holes. Room is reserved for some at a time: they take less than a leaf may.
    fn keep_zeros(&self, blocks: Range<u64>, scratch: &mut Scratch) -> Result<(), DiskError> {
        let mut block = blocks.start;
        while block < blocks.end {
            let end = (block / LEAF_BLOCKS + LEAVES_ZEROED) * LEAF_BLOCKS;
            let end = end.min(blocks.end);
            let leaves = (end - 1) / LEAF_BLOCKS - block / LEAF_BLOCKS + 1;
            let _room = self.memory.reserve(leaves * LEAF_BYTES, 0, scratch)?;
            self.zero_blocks(block..end, Block::Zero);
            block = end;
        }
        Ok(())
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
        let (mut discarded, mut empty, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let mut block = blocks.start;
        while block < blocks.end {
            let number = block / LEAF_BLOCKS;
            let missing = self.memory.map.holes_from(number);
            if to == Block::Hole && missing > 0 {
                block = (number + missing) * LEAF_BLOCKS;
                continue;
            }
            let end = blocks.end.min((number + 1) * LEAF_BLOCKS);
            let is_whole = block.is_multiple_of(LEAF_BLOCKS) && end - block == LEAF_BLOCKS;
            let mut place = if to == Block::Hole {
                self.memory.map.write_existing(number)
            } else {
                Some(self.memory.map.write(number))
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
                    if leaf.is_hole() {
                        empty.extend(place.take());
                    }
                }
            }
            block = end;
        }
        self.memory.discard(discarded);
        self.memory.free_leaves(empty);
        self.memory.space.release_bulk(&slots);
    }

    /// The extent at an offset, at most up to `end`. Extents end at multiples of 2 MiB where that is
    /// quicker to tell; neighbours may be of one kind.
    pub fn extent(&self, offset: u64, end: u64) -> Extent {
        let first = offset / BLOCK;
        let number = first / LEAF_BLOCKS;
        let missing = self.memory.map.holes_from(number);
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
        let guard = self.memory.map.read(number);
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
        self.memory.used_bytes()
    }

    /// Moves all blocks from the swap file to memory and stops using the file, while clients read and
    /// write. Returns the number of blocks that were in it. Writes that find no room wait meanwhile.
    ///
    /// # Errors
    ///
    /// If there is no file; if the blocks do not fit into 7/8 of the limit, or cannot be read: the file stays
    /// in use then.
    pub fn swap_off(&self) -> Result<u64, SwapOffError> {
        swap_off(&self.memory)
    }

    /// Has discards free blocks in the thread that discards, to measure what the worker saves it.
    #[doc(hidden)]
    pub fn free_in_caller(&mut self, in_caller: bool) {
        self.memory.discarder.set_in_caller(in_caller);
    }

    /// Frees everything that was discarded before the call.
    pub fn settle_discards(&self) {
        self.memory.discarder.flush();
    }

    /// Statistics.
    pub fn usage(&self) -> DiskUsage {
        let space = self.memory.space.usage();
        let counters = &self.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let used_bytes = self.used_bytes();
        let remote = self.memory.remote.as_ref();
        let remote = remote.map(|remote| remote.usage()).unwrap_or_default();
        DiskUsage {
            size_bytes: self.size,
            limit_bytes: self.limit(),
            used_bytes,
            peak_bytes: get(&counters.peak_bytes).max(used_bytes),
            original_bytes: space.original_bytes,
            stored_bytes: space.stored_bytes,
            same_filled_blocks: space.same_filled_pages,
            incompressible_blocks: space.incompressible_pages,
            packed_blocks: space.block_pages,
            dead_bytes: space.dead_bytes,
            file_blocks: space.file_pages,
            file_bytes: space.file_bytes,
            remote_blocks: space.remote_pages,
            remote_bytes: space.remote_bytes,
            remote_blocks_out: remote.pages_out,
            remote_blocks_in: remote.pages_in,
            remote_retries: remote.retries,
            remote_failures: remote.store_failures + remote.load_failures,
            remote_lost_blocks: remote.lost_pages,
            remote_copies_read: remote.copies_read,
            read_bytes: get(&counters.read_bytes),
            written_bytes: get(&counters.written_bytes),
            discarded_bytes: get(&counters.discarded_bytes),
            reads: get(&counters.reads),
            writes: get(&counters.writes),
            discards: get(&counters.discards),
            failed_reads: get(&counters.failed_reads),
            failed_writes: get(&counters.failed_writes),
            discard_backlog_blocks: self.memory.discarder.backlog().blocks(),
        }
    }
}

/// The parts of a request, by blocks.
pub(crate) fn parts(offset: u64, length: usize) -> impl Iterator<Item = Part> {
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
