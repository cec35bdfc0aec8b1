//! How long a read takes.

use crate::block_map::{Block, LEAF_BLOCKS};
use crate::disk::{BLOCK, Disk};
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

impl<S: PageSource + 'static> Disk<S> {
    /// How long it takes to read a range of the disk; `None` if part of it is a hole or zero. May be outdated at once.
    pub(crate) fn pace(&self, range: &Range<u64>) -> Option<Pace> {
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let pace = |block: u64| {
            let leaf = self.memory.map.read(block / LEAF_BLOCKS);
            let leaf = leaf.as_ref().and_then(|leaf| leaf.as_deref())?;
            let Block::Stored(slot) = leaf.get((block % LEAF_BLOCKS) as usize) else {
                return None;
            };
            // The leaf is locked, so the slot has a page.
            Some(match self.memory.space.look_up(slot)?.0 {
                TierKind::Block => Pace::Slow,
                TierKind::File | TierKind::Remote => Pace::Waits,
                _ => Pace::Fast,
            })
        };
        blocks
            .map(pace)
            .try_fold(Pace::Fast, |most, pace| Some(most.max(pace?)))
    }
}
