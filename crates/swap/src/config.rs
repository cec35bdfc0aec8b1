//! The configuration of a swap space.

use crate::{
    block_record::{BLOCK_PAGES, MAX_BLOCK_PAGES},
    checksum::Checksums,
    codec::Algorithm,
    error::NewSwapSpaceError,
    slot::CLUSTER_SLOTS,
};

/// Slots (256 GiB of pages) where address space is limited. More slots reserve a larger swap table.
const FEWER_SLOTS: usize = 1 << 26;

/// The configuration of a swap space.
#[derive(Debug, Clone)]
pub struct SwapConfig {
    /// The algorithm that stores use.
    pub algorithm: Algorithm,
    /// The Zstandard level for recompression of cold pages.
    pub recompress_level: i32,
    /// How neighbours are recompressed together in the background.
    pub blocks: BlockShape,
    /// How neighbours are recompressed together where a caller waits for room:
    /// [`scan_for_room`](crate::SwapSpace::scan_for_room).
    pub blocks_for_room: BlockShape,
    /// A block must save one in `block_saving` bytes of what its pages take; at least 1. Less is not worth
    /// the longer loads.
    pub block_saving: u64,
    /// Whether pages have a checksum that is verified on load.
    pub checksum: bool,
    /// Pages of address space for the pool, the most it can ever hold. It takes memory only for
    /// what it stores; [`SwapConfig::capacity_for`] says how many it needs.
    pub pool_capacity_pages: usize,
    /// The most slots, rounded up to whole clusters. They cost address space only.
    pub max_slots: usize,
    /// Shards of the space, so that threads do not contend: the number of CPUs, or 0 for a default.
    pub shards: usize,
}

/// How neighbours are recompressed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShape {
    /// The most pages of a block, at most 16; less than 2 for none. More take less memory, and longer to load one of.
    pub pages: usize,
    /// The Zstandard level. Higher takes less memory and more time to store.
    pub level: i32,
}

impl Default for BlockShape {
    fn default() -> Self {
        BlockShape {
            pages: BLOCK_PAGES,
            level: 1,
        }
    }
}

impl Default for SwapConfig {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Lz4,
            recompress_level: 3,
            blocks: BlockShape::default(),
            blocks_for_room: BlockShape::default(),
            block_saving: 8,
            checksum: true,
            pool_capacity_pages: 1 << 24,
            max_slots: 1 << 28,
            shards: 0,
        }
    }
}

impl SwapConfig {
    /// Fails if a value is out of range.
    pub(crate) fn check(&self) -> Result<(), NewSwapSpaceError> {
        let clusters = self.max_slots.div_ceil(CLUSTER_SLOTS);
        // The number behind the last slot fits in 32 bits, too.
        if clusters == 0 || clusters >= (1 << 32) / CLUSTER_SLOTS - 1 {
            return Err(NewSwapSpaceError::Config(
                "max_slots must be between 1 and 2^32 - 1024",
            ));
        }
        if self.shards > 1024 {
            return Err(NewSwapSpaceError::Config("shards must be at most 1024"));
        }
        let shapes = [self.blocks, self.blocks_for_room];
        if shapes.iter().any(|shape| shape.pages > MAX_BLOCK_PAGES) {
            return Err(NewSwapSpaceError::Config("a block has at most 16 pages"));
        }
        Ok(())
    }

    pub(crate) fn checksums(&self) -> Checksums {
        if self.checksum {
            Checksums::On
        } else {
            Checksums::Off
        }
    }

    /// Address space, in pages, for a pool that never holds more than `pages` pages at a time, whatever
    /// their sizes: [`zsmalloc::Config::capacity_for`].
    pub fn capacity_for(pages: usize) -> usize {
        zsmalloc::Config::capacity_for(pages)
    }

    /// This configuration for a pool that never holds more than `pages` pages, from the most address space to the least,
    /// for [`SwapSpace::new_that_fits`](crate::SwapSpace::new_that_fits). All but the first have fewer slots, and suffice
    /// where pages compress alike.
    pub fn for_pool_of(self, pages: usize) -> impl Iterator<Item = SwapConfig> {
        let most = Self::capacity_for(pages);
        let scarce = [4, 2, 1].map(|times: usize| SwapConfig {
            pool_capacity_pages: times.saturating_mul(pages.next_power_of_two()),
            max_slots: self.max_slots.min(FEWER_SLOTS),
            ..self.clone()
        });
        let plentiful = SwapConfig {
            pool_capacity_pages: most,
            ..self
        };
        let scarce = scarce
            .into_iter()
            .filter(move |one| one.pool_capacity_pages < most);
        std::iter::once(plentiful).chain(scarce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_pools_still_hold_what_the_limit_allows() {
        let configs: Vec<_> = SwapConfig::default().for_pool_of(3000).collect();
        let pages: Vec<_> = configs.iter().map(|one| one.pool_capacity_pages).collect();
        assert_eq!(pages, [54_000, 16_384, 8192, 4096]);
        let slots: Vec<_> = configs.iter().map(|one| one.max_slots).collect();
        assert_eq!(slots, [1 << 28, 1 << 26, 1 << 26, 1 << 26]);
        // The largest capacity there may be.
        let few = SwapConfig::default().for_pool_of(1 << 30);
        let pages: Vec<_> = few.map(|one| one.pool_capacity_pages).collect();
        assert_eq!(pages, [1 << 31, 1 << 30]);
    }

    #[test]
    fn the_number_behind_the_last_slot_fits() {
        let with = |max_slots| SwapConfig {
            max_slots,
            ..SwapConfig::default()
        };
        assert!(with((1 << 32) - 1024).check().is_ok());
        assert!(with((1 << 32) - 1023).check().is_err());
    }
}
