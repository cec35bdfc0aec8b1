//! What a supervisor is started with.

use std::path::PathBuf;
use std::time::Duration;

/// Compression algorithm of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Algorithm {
    /// LZ4: the fastest.
    #[default]
    Lz4,
    /// Zstandard: smaller, slower.
    Zstd,
}

impl From<Algorithm> for memfold_swap::Algorithm {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Lz4 => Self::Lz4,
            Algorithm::Zstd => Self::Zstd,
        }
    }
}

/// The memory limit of a group, in bytes. At least one of the two is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limit {
    /// Everything that memfold manages: resident anonymous pages, stage, pool and metadata.
    pub total_bytes: Option<u64>,
    /// Resident anonymous pages (the stage included) alone, as a memory cgroup with zram counts.
    pub resident_bytes: Option<u64>,
}

/// A file for what does not fit into the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapFileOptions {
    /// Where the file is made. It has no name there.
    pub directory: PathBuf,
    /// The most that it may take, in bytes.
    pub bytes: u64,
}

/// Options of a [`crate::Supervisor`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The group's limit.
    pub limit: Limit,
    /// The pool's algorithm.
    pub algorithm: Algorithm,
    /// Keep and verify a checksum a stored page.
    pub checksum: bool,
    /// Where pages go that neither the limit nor the pool's share of it have room for.
    pub swap_file: Option<SwapFileOptions>,
    /// Compress pages again, with Zstandard, that stayed out for so long. `None`: never.
    pub recompress_after: Option<Duration>,
    /// Write pages to the swap file that stayed out for so long. `None`: only when the pool is
    /// larger than its share.
    pub writeback_after: Option<Duration>,
    /// The preload library's image (an ELF shared object), written to `runtime_dir`.
    pub agent_image: &'static [u8],
    /// Where the run's private directory (control socket, preload library) is made, under a random
    /// name; it is removed when the supervisor stops. Processes that were not managed may keep its
    /// name in their `LD_PRELOAD`: nobody but this user may ever be able to make names in here.
    pub runtime_dir: PathBuf,
}
