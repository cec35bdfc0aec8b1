//! What a thread needs to store and load pages.

use crate::{PAGE_SIZE, zstd::ZstdContexts};

/// The buffers and codec states of one thread. Making one is cheap; the state of a codec is made
/// when it is first used. Any scratch serves any space.
#[derive(Default)]
pub struct Scratch {
    buffer: Buffer,
    zstd: ZstdContexts,
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

    /// A new scratch that has what loads need already, so that none fails later for want of memory. If
    /// there is none now, a load that needs it tries again.
    pub fn for_loads() -> Self {
        let mut scratch = Self::default();
        scratch.zstd.prepare();
        scratch
    }

    /// Where compressed data is put together, and the states of the codecs.
    pub(crate) fn parts(&mut self) -> (&mut [u8; PAGE_SIZE], &mut ZstdContexts) {
        (&mut self.buffer.0, &mut self.zstd)
    }
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}
