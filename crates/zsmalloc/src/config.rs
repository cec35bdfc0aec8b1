//! The configuration of a pool.

use crate::geometry::{MAX_CAPACITY_PAGES, MAX_CHAIN_PAGES};

/// The configuration of a [`Pool`](crate::Pool).
///
/// ```
/// use zsmalloc::{Config, HeapSource, Pool};
///
/// let config = Config::with_capacity_pages(1 << 16)
///     .shards(2)
///     .retained_pages(256);
/// let pool = Pool::new(HeapSource::new(), config)?;
/// # Ok::<(), zsmalloc::NewPoolError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Config {
    pub(crate) capacity_pages: usize,
    pub(crate) max_chain_pages: usize,
    pub(crate) zero_freed: bool,
    pub(crate) shards: usize,
    pub(crate) retained_pages: usize,
    pub(crate) deferred_bytes: usize,
    pub(crate) spare_part: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            capacity_pages: 1 << 24,
            max_chain_pages: MAX_CHAIN_PAGES,
            zero_freed: false,
            shards: 0,
            retained_pages: 4096,
            deferred_bytes: 8 << 20,
            spare_part: 32,
        }
    }
}

impl Config {
    /// The default configuration: 64 GiB of address space.
    pub fn new() -> Self {
        Self::default()
    }

    /// The default configuration with `capacity_pages` pages of address space, the most the pool
    /// can ever hold. Rounded up to a power of two, at least 1024.
    ///
    /// Reserve more than what is to be stored: address space that zspages of one length have used is not
    /// reused for other lengths. [`Config::capacity_for`] says how much more.
    pub fn with_capacity_pages(capacity_pages: usize) -> Self {
        Self {
            capacity_pages,
            ..Self::default()
        }
    }

    /// The capacity, in pages, of a pool that never holds more than `pages` pages at a time: enough for
    /// zspages of each length to take all of it once, whatever was stored before, or the largest capacity
    /// if that is less.
    ///
    /// ```
    /// assert_eq!(zsmalloc::Config::capacity_for(1 << 20), 18 << 20);
    /// ```
    pub fn capacity_for(pages: usize) -> usize {
        /// An eighth more: not all runs fill their units, nor all arenas their extents.
        const TIMES: usize = MAX_CHAIN_PAGES + MAX_CHAIN_PAGES / 8;
        pages.saturating_mul(TIMES).min(MAX_CAPACITY_PAGES)
    }

    /// The most pages of a zspage, 1 to [`MAX_CHAIN_PAGES`] (the default). Longer zspages waste
    /// fewer bytes at their end, but one object keeps all their pages.
    #[must_use]
    pub fn max_chain_pages(mut self, pages: usize) -> Self {
        self.max_chain_pages = pages;
        self
    }

    /// Whether a store zeroes the rest of the object's slot, so that freed data cannot be read
    /// through a new object. Off by default.
    #[must_use]
    pub fn zero_freed(mut self, zero: bool) -> Self {
        self.zero_freed = zero;
        self
    }

    /// The number of shards, rounded up to a power of two, at most 256. Each has zspages of its
    /// own, and threads are distributed over them. 0, the default: one for each CPU.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// The most pages of freed runs that a shard keeps for later allocations instead of returning
    /// them to the kernel at once; 4096 by default. A shard never keeps more than 1/64 of the
    /// pool's resident pages, or 64 pages if that is more. Its bins keep as many pages again in
    /// empty zspages, at most 256.
    #[must_use]
    pub fn retained_pages(mut self, pages: usize) -> Self {
        self.retained_pages = pages;
        self
    }

    /// The most bytes of objects whose free is deferred, over all shards, and the most bytes of
    /// freed runs left to a [`Drainer`](crate::Drainer); 8 MiB by default. Beyond it the freeing
    /// thread does the work itself. 0: nothing is deferred.
    #[must_use]
    pub fn deferred_bytes(mut self, bytes: usize) -> Self {
        self.deferred_bytes = bytes;
        self
    }

    /// Limits the free pages inside huge pages to 1/`part` of the pool; 32 by default. 0: no huge
    /// pages.
    ///
    /// The pool asks its source for a huge page only while the limit would hold with half of the
    /// new page free, so a pool smaller than `part` / 2 huge pages has none. Where frees leave more
    /// free pages than that, huge pages are split: by [`Pool::trim_spare`](crate::Pool::trim_spare)
    /// and [`Pool::trim`](crate::Pool::trim), by an idle [`Drainer`](crate::Drainer) above twice
    /// the limit, and by frees once 1/8 of the pool has been free for a while.
    #[must_use]
    pub fn spare_part(mut self, part: usize) -> Self {
        self.spare_part = part;
        self
    }
}
