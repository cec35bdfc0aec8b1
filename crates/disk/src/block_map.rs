//! Which slot holds each block.
//!
//! A tree of three levels. The top is as long as the disk is large: 16 bytes for each GiB. A region of
//! 1 GiB is made at its first write, a leaf of 512 blocks at the first write to its 2 MiB. Each leaf has a
//! lock of its own: readers of a block hold it shared while they load, so that its slot stays theirs.

use crate::sync::unpoisoned;
use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Blocks of a leaf.
pub(crate) const LEAF_BLOCKS: u64 = 512;
/// Leaves of a region.
const REGION_LEAVES: u64 = 512;

/// What a block holds. Packed into the number of its slot: 0 and the largest are no slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Block {
    /// Nothing was written, or it was discarded: zeros.
    Hole,
    /// Zeros were written. It takes no more memory than a hole.
    Zero,
    /// A page of the swap space; the entry owns one count of the slot.
    Stored(Slot),
}

/// The entries of 512 blocks.
#[derive(Debug)]
pub(crate) struct Leaf([u32; LEAF_BLOCKS as usize]);

impl Leaf {
    const HOLE: u32 = 0;
    const ZERO: u32 = u32::MAX;

    /// A leaf of holes.
    pub(crate) fn new() -> Box<Leaf> {
        Box::new(Leaf([Self::HOLE; LEAF_BLOCKS as usize]))
    }

    /// The block at an index.
    pub(crate) fn get(&self, index: usize) -> Block {
        match self.0[index] {
            Self::HOLE => Block::Hole,
            Self::ZERO => Block::Zero,
            slot => Block::Stored(Slot::from_raw(slot)),
        }
    }

    /// Sets a block; returns the slot that the entry owned before.
    pub(crate) fn replace(&mut self, index: usize, block: Block) -> Option<Slot> {
        let before = self.get(index);
        self.0[index] = match block {
            Block::Hole => Self::HOLE,
            Block::Zero => Self::ZERO,
            Block::Stored(slot) => {
                let raw = slot.into_raw();
                debug_assert!(raw != Self::HOLE && raw != Self::ZERO);
                raw
            }
        };
        match before {
            Block::Stored(slot) => Some(slot),
            Block::Hole | Block::Zero => None,
        }
    }

    /// Whether all blocks are holes. Quick enough for each discard of one block: it ends at the first 64 blocks that are not
    /// all holes, and looks at many at a time.
    pub(crate) fn is_hole(&self) -> bool {
        let (parts, _) = self.0.as_chunks::<64>();
        let is_hole =
            |part: &[u32; 64]| part.iter().fold(0, |all, entry| all | entry) == Self::HOLE;
        parts.iter().all(is_hole)
    }

    /// The slots of all blocks, in their order.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        (0..self.0.len()).filter_map(|index| match self.get(index) {
            Block::Stored(slot) => Some(slot),
            Block::Hole | Block::Zero => None,
        })
    }
}

type Place = RwLock<Option<Box<Leaf>>>;
type Region = Box<[Place]>;
/// A leaf that is locked for readers.
pub(crate) type ReadGuard<'a> = RwLockReadGuard<'a, Option<Box<Leaf>>>;

/// A writer has or waits for the lock of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Busy;

/// The map of a disk.
#[derive(Debug)]
pub(crate) struct BlockMap {
    regions: Box<[OnceLock<Region>]>,
    bytes: AtomicU64,
}

impl BlockMap {
    /// A map of holes.
    pub(crate) fn new(blocks: u64) -> BlockMap {
        let regions = blocks.div_ceil(LEAF_BLOCKS * REGION_LEAVES);
        let regions: Box<[_]> = (0..regions).map(|_| OnceLock::new()).collect();
        let bytes = AtomicU64::new(size_of_val(&*regions) as u64);
        BlockMap { regions, bytes }
    }

    /// The leaf of a number, for readers; `None` if all its region is holes.
    pub(crate) fn read(&self, leaf: u64) -> Option<ReadGuard<'_>> {
        let place = self.place(leaf)?;
        // No critical section leaves a leaf half changed.
        Some(unpoisoned(place.read()))
    }

    /// As [`read`](Self::read), without a wait.
    pub(crate) fn try_read(&self, leaf: u64) -> Result<Option<ReadGuard<'_>>, Busy> {
        let Some(place) = self.place(leaf) else {
            return Ok(None);
        };
        match place.try_read() {
            Ok(leaf) => Ok(Some(leaf)),
            Err(TryLockError::Poisoned(leaf)) => Ok(Some(leaf.into_inner())),
            Err(TryLockError::WouldBlock) => Err(Busy),
        }
    }

    /// Whether a change of the leaf would wait now.
    pub(crate) fn is_locked(&self, leaf: u64) -> bool {
        let place = self.place(leaf).map(|place| place.try_write());
        matches!(place, Some(Err(TryLockError::WouldBlock)))
    }

    fn place(&self, leaf: u64) -> Option<&Place> {
        let region = self.regions[(leaf / REGION_LEAVES) as usize].get()?;
        Some(&region[(leaf % REGION_LEAVES) as usize])
    }

    /// The leaf of a number, for a change; its region is made.
    pub(crate) fn write(&self, leaf: u64) -> RwLockWriteGuard<'_, Option<Box<Leaf>>> {
        let region = self.regions[(leaf / REGION_LEAVES) as usize].get_or_init(|| {
            let region: Region = (0..REGION_LEAVES).map(|_| RwLock::new(None)).collect();
            self.add_bytes(size_of_val(&*region) as i64);
            region
        });
        Self::lock(&region[(leaf % REGION_LEAVES) as usize])
    }

    /// The leaf of a number, for a change of what is there; `None` if all its region is holes.
    pub(crate) fn write_existing(
        &self,
        leaf: u64,
    ) -> Option<RwLockWriteGuard<'_, Option<Box<Leaf>>>> {
        Some(Self::lock(self.place(leaf)?))
    }

    fn lock(place: &Place) -> RwLockWriteGuard<'_, Option<Box<Leaf>>> {
        unpoisoned(place.write())
    }

    /// The number of leaves from `leaf` on whose region does not exist, for skipping them; 0 if it does.
    pub(crate) fn holes_from(&self, leaf: u64) -> u64 {
        match self.regions[(leaf / REGION_LEAVES) as usize].get() {
            Some(_) => 0,
            None => REGION_LEAVES - leaf % REGION_LEAVES,
        }
    }

    /// Notes that a leaf was made (positive) or given away.
    pub(crate) fn note_leaves(&self, leaves: i64) {
        self.add_bytes(leaves * size_of::<Leaf>() as i64);
    }

    fn add_bytes(&self, bytes: i64) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that the map takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_what_they_are_set_to() {
        let mut leaf = Leaf::new();
        let slot = Slot::from_raw(700);
        assert_eq!(leaf.get(3), Block::Hole);
        assert_eq!(leaf.replace(3, Block::Stored(slot)), None);
        assert_eq!(leaf.replace(4, Block::Zero), None);
        assert_eq!(
            (leaf.get(3), leaf.get(4)),
            (Block::Stored(slot), Block::Zero)
        );
        assert_eq!(leaf.slots().collect::<Vec<_>>(), [slot]);
        assert_eq!(leaf.replace(3, Block::Hole), Some(slot));
        assert_eq!(leaf.replace(4, Block::Hole), None);
        assert!(leaf.is_hole());
        for index in [0, 64, 511] {
            leaf.replace(index, Block::Zero);
            assert!(!leaf.is_hole(), "{index}");
            leaf.replace(index, Block::Hole);
        }
    }

    #[test]
    fn a_map_of_holes_is_small() {
        let map = BlockMap::new((1 << 50) / 4096);
        assert!(map.bytes() < 32 << 20, "{}", map.bytes());
        assert!(map.read(5).is_none() && map.write_existing(5).is_none());
        *map.write(REGION_LEAVES + 5) = Some(Leaf::new());
        assert!(
            map.read(REGION_LEAVES + 5)
                .is_some_and(|leaf| leaf.is_some())
        );
        assert_eq!(
            (map.holes_from(5), map.holes_from(REGION_LEAVES)),
            (REGION_LEAVES - 5, 0)
        );
    }
}
