//! A thread's buffers for storing and loading pages.

use crate::{PAGE_SIZE, zstd::ZstdContexts};

/// The buffer and codec contexts of one thread, for any space. Contexts are allocated on first use.
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

    /// A new scratch with what loads need allocated in advance, so that no load fails for want of
    /// memory. If there is none now, a load that needs it tries again.
    pub fn for_loads() -> Self {
        let mut scratch = Self::default();
        scratch.zstd.prepare();
        scratch
    }

    /// The buffer for compressed data, and the codec contexts.
    pub(crate) fn parts(&mut self) -> (&mut [u8; PAGE_SIZE], &mut ZstdContexts) {
        (&mut self.buffer.0, &mut self.zstd)
    }
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").finish_non_exhaustive()
    }
}
