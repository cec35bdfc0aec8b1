//! Sizes that all parts of a pool agree on, and page numbers.

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;

/// The most pages a zspage may have.
pub const MAX_CHAIN_PAGES: usize = 16;

/// The largest capacity of a pool: a page number has 32 bits, and the last one is reserved.
pub(crate) const MAX_CAPACITY_PAGES: usize = 1 << 31;

/// Pages of a unit: the longest run fits in one.
pub(crate) const UNIT_PAGES: usize = 1 << UNIT_SHIFT;
pub(crate) const UNIT_SHIFT: u32 = MAX_CHAIN_PAGES.trailing_zeros();

/// The most pages of an extent: those of a PMD-sized huge page.
pub(crate) const MAX_EXTENT_PAGES: usize = 512;

/// The most shards a pool may have.
pub(crate) const MAX_SHARDS: usize = 256;

/// A page of the pool's range, counted from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageNumber(pub(crate) u32);
