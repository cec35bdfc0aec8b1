//! A thread's buffers for storing and loading pages.

use crate::{PAGE_SIZE, block_record::BLOCK_PAGES, page::Page, zstd::ZstdContexts};

/// The buffer and codec contexts of one thread, for any space. Contexts are allocated on first use.
#[derive(Default)]
pub struct Scratch {
    buffer: Buffer,
    zstd: ZstdContexts,
    block: BlockBuffer,
}

/// The block that was decompressed last, and room for its compressed data. Allocated on first use.
#[derive(Default)]
pub(crate) struct BlockBuffer {
    plain: Vec<Page>,
    packed: Vec<u8>,
    /// The number of the block whose pages `plain` has; 0 for none.
    number: u64,
    /// Its pages.
    pages: usize,
}

impl BlockBuffer {
    /// Allocates buffers for a block of `pages` pages, if there is memory. They are not written to: most threads load no
    /// block, and memory that is not written to takes no page.
    fn prepare(&mut self, pages: usize) -> Option<()> {
        let missing = pages.saturating_sub(self.plain.len());
        self.plain.try_reserve_exact(missing).ok()?;
        let missing = (pages * PAGE_SIZE).saturating_sub(self.packed.len());
        self.packed.try_reserve_exact(missing).ok()
    }

    /// Room for a block of `pages` pages, plain and compressed, in place of the previous block.
    /// `None` if there is no memory.
    pub(crate) fn begin(&mut self, pages: usize) -> Option<(&mut [Page], &mut [u8])> {
        self.prepare(pages)?;
        if self.plain.len() < pages {
            self.packed.resize(pages * PAGE_SIZE, 0);
            self.plain.resize(pages, [0; PAGE_SIZE]);
        }
        self.number = 0;
        self.pages = pages;
        let plain = self.plain.get_mut(..pages)?;
        Some((plain, &mut self.packed))
    }

    /// Notes that the plain pages are those of the block with this number.
    pub(crate) fn end(&mut self, number: u64) {
        self.number = number;
    }

    /// The number of the block that it holds; 0 for none.
    #[cfg(test)]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether the plain pages are those of this block.
    pub(crate) fn holds(&self, number: u64) -> bool {
        number != 0 && self.number == number
    }

    /// A page of the block that it holds.
    pub(crate) fn page(&self, place: usize) -> Option<&Page> {
        self.plain[..self.pages].get(place)
    }

    /// The compressed data.
    pub(crate) fn packed(&self) -> &[u8] {
        &self.packed
    }
}

struct Buffer(Box<[u8; PAGE_SIZE]>);

impl Default for Buffer {
    fn default() -> Self {
        Self(Box::new([0; PAGE_SIZE]))
    }
}

impl Scratch {
    /// A new scratch.
    pub fn new() -> Self {
        Self::default()
    }

    /// A new scratch with what loads need allocated in advance, so that no load fails for want of
    /// memory. If there is none now, a load that needs it tries again.
    pub fn for_loads() -> Self {
        let mut scratch = Self::default();
        scratch.prepare_loads();
        scratch
    }

    /// Allocates what loads need. `false` if there is no memory: a load that needs it tries again, and fails if there is
    /// none then.
    pub fn prepare_loads(&mut self) -> bool {
        self.zstd.prepare() & self.block.prepare(BLOCK_PAGES).is_some()
    }

    /// The buffer for compressed data, and the codec contexts.
    pub(crate) fn parts(&mut self) -> (&mut [u8; PAGE_SIZE], &mut ZstdContexts) {
        (&mut self.buffer.0, &mut self.zstd)
    }

    /// The buffers for a block, and the codec contexts.
    pub(crate) fn block_parts(&mut self) -> (&mut BlockBuffer, &mut ZstdContexts) {
        (&mut self.block, &mut self.zstd)
    }
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}
