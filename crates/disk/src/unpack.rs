//! Storing blocks anew that are packed though they are hot.
//!
//! A block that is read twice between two passes of [`packing`](crate::packing) pays each time for all its
//! neighbours. It is stored alone then, if there is room.

use crate::block_map::{Block, LEAF_BLOCKS};
use crate::memory::Memory;
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot};
use zsmalloc::{MAX_CHAIN_PAGES, PageSource};

/// Blocks to store anew, with the slot, of which it holds a count, and the contents of each.
pub(crate) type Hot = Vec<(u64, Slot, Box<Page>)>;

impl<S: PageSource + 'static> Memory<S> {
    /// The slot of a block that is packed though it is hot. To be asked before it is read.
    pub(crate) fn hot_slot(&self, block: Block) -> Option<Slot> {
        match block {
            Block::Stored(slot) if self.space.is_hot_in_block(slot) => Some(slot),
            _ => None,
        }
    }

    /// Notes a hot block and what was read of it. Its leaf is still locked.
    pub(crate) fn note_hot(&self, number: u64, slot: Slot, page: &Page, hot: &mut Hot) {
        // Without a count, the block stays as it is.
        if self.space.duplicate(slot).is_ok() {
            hot.push((number, slot, Box::new(*page)));
        }
    }

    /// Stores hot blocks anew, if there is room now. As the counts keep their slots from being used again,
    /// a block whose entry still has the slot holds what was read.
    pub(crate) fn unpack(&self, hot: Hot, scratch: &mut Scratch) {
        for (number, slot, page) in hot {
            let room = self.try_reserve((MAX_CHAIN_PAGES * PAGE_SIZE) as u64);
            let stored = room.map(|_room| self.space.store(&page, scratch));
            if let Some(Ok(alone)) = stored {
                let unused = self.replace_if(number, slot, alone);
                self.space.release(unused);
            }
            self.space.release(slot);
        }
    }

    /// Gives a block another slot in place of the one it had, if it still has it. Returns the one that is
    /// not needed.
    fn replace_if(&self, number: u64, before: Slot, after: Slot) -> Slot {
        let index = (number % LEAF_BLOCKS) as usize;
        let mut place = self.map.write_existing(number / LEAF_BLOCKS);
        let leaf = place.as_mut().and_then(|place| place.as_mut());
        match leaf {
            Some(leaf) if leaf.get(index) == Block::Stored(before) => {
                leaf.replace(index, Block::Stored(after));
                before
            }
            _ => after,
        }
    }
}
