//! How long requests take.

use crate::block_map::{Block, Busy, LEAF_BLOCKS};
use crate::disk::{BLOCK, Disk, LEAVES_ZEROED};
use crate::memory::LEAF_BYTES;
use crate::write::MOST_STORED;
use memfold_swap::TierKind;
use std::ops::Range;
use zsmalloc::PageSource;

/// How long a read takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pace {
    /// A few microseconds.
    Fast,
    /// A CPU is busy for tens of microseconds: neighbours are decompressed, too.
    Slow,
    /// The swap file or a store is waited for.
    Waits,
}

/// None of these waits, and what they tell may be outdated at once.
impl<S: PageSource + 'static> Disk<S> {
    /// How long it takes to read a range of the disk; `None` if part of it is a hole, zero, or being written.
    pub(crate) fn pace(&self, range: &Range<u64>) -> Option<Pace> {
        blocks(range)
            .map(|block| self.pace_of(block).ok().flatten())
            .try_fold(Pace::Fast, |most, pace| Some(most.max(pace?)))
    }

    /// The same of a block; `None` if it is a hole or zero.
    fn pace_of(&self, block: u64) -> Result<Option<Pace>, Busy> {
        let leaf = self.memory.map.try_read(block / LEAF_BLOCKS)?;
        let block = leaf
            .as_ref()
            .and_then(|leaf| leaf.as_deref())
            .map(|leaf| leaf.get((block % LEAF_BLOCKS) as usize));
        let Some(Block::Stored(slot)) = block else {
            return Ok(None);
        };
        // The leaf is locked, so the slot has a page.
        let found = self.memory.space.look_up(slot);
        Ok(found.map(|(tier, _)| match tier {
            TierKind::Block => Pace::Slow,
            TierKind::File | TierKind::Remote => Pace::Waits,
            _ => Pace::Fast,
        }))
    }

    /// Whether a read of a range of the disk may wait for the swap file or a store: also where a writer does, which has the
    /// lock.
    pub(crate) fn read_waits(&self, range: &Range<u64>) -> bool {
        let waits = |block| {
            !matches!(
                self.pace_of(block),
                Ok(None | Some(Pace::Fast | Pace::Slow))
            )
        };
        self.memory.may_wait() && blocks(range).any(waits)
    }

    /// Whether a write of a range may wait for room, for a block of which it writes a part, or for a request that does.
    pub(crate) fn write_waits(&self, range: &Range<u64>) -> bool {
        let count = blocks(range).count() as u64;
        !self.memory.has_room(LEAF_BYTES + count * MOST_STORED) || self.change_waits(range)
    }

    /// Whether making a range zero may wait for room, for a block of which it zeroes a part, or for a request that does.
    pub(crate) fn zero_waits(&self, range: &Range<u64>) -> bool {
        let most = LEAVES_ZEROED * LEAF_BYTES + 2 * MOST_STORED;
        !self.memory.has_room(most) || self.change_waits(range)
    }

    /// Whether anything else that has to do with a range may wait: for a block of which it changes a part, or for a request
    /// that waits for the swap file or a store with the lock of a leaf.
    pub(crate) fn change_waits(&self, range: &Range<u64>) -> bool {
        let blocks = blocks(range);
        let mut leaves = blocks.start / LEAF_BLOCKS..blocks.end.div_ceil(LEAF_BLOCKS);
        let map = &self.memory.map;
        self.memory.may_wait() && leaves.any(|leaf| map.is_locked(leaf)) || self.edge_waits(range)
    }

    fn edge_waits(&self, range: &Range<u64>) -> bool {
        let is_in_block = |edge: &u64| !edge.is_multiple_of(BLOCK);
        let mut edges = [range.start, range.end].into_iter().filter(is_in_block);
        edges.any(|edge| self.read_waits(&(edge..edge + 1)))
    }
}

/// The blocks of which a range has a part.
fn blocks(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}
