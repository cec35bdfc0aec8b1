//! Options of a supervisor.

use memfold_swap::{Algorithm, RemoteTier};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The memory limit of a group, in bytes. At least one of the two is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limit {
    /// Limit on everything that memfold manages: resident anonymous pages, stage, pool and metadata.
    pub total_bytes: Option<u64>,
    /// Limit on resident anonymous pages (stage included) alone, as a memory cgroup with zram counts.
    pub resident_bytes: Option<u64>,
}

/// A swap file for pages that do not fit into the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapFileOptions {
    /// Directory in which the unnamed file (`O_TMPFILE`) is created.
    pub directory: PathBuf,
    /// Maximum size of the file in bytes.
    pub bytes: u64,
}

/// A store on other machines for pages that fit neither into memory nor into the swap file.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// The tier. The caller maintains it, and clears it after the supervisor has stopped.
    pub tier: Arc<RemoteTier>,
    /// Keep a copy of each page in the swap file, which there must be, and read it where the store fails.
    pub keep_copies: bool,
}

/// When cold pages are recompressed, neighbours together as blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recompress {
    /// After this time without an access.
    pub after: Duration,
    /// Sooner while memory is short and CPUs are idle. No effect with [`Options::writeback_after`], where there is
    /// a file or a store: pages move by time then.
    pub under_pressure: bool,
}

/// Options of a [`crate::Supervisor`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The group's limit.
    pub limit: Limit,
    /// The pool's algorithm.
    pub algorithm: Algorithm,
    /// Keep and verify a checksum for each stored page.
    pub checksum: bool,
    /// Swap file for pages that fit neither into the limit nor into the pool's share of it.
    pub swap_file: Option<SwapFileOptions>,
    /// A store on other machines for what does not fit there, either.
    pub remote: Option<RemoteOptions>,
    /// Recompression of cold pages with Zstandard. `None`: never.
    pub recompress: Option<Recompress>,
    /// Write pages to the swap file or the store after this time without an access. `None`: only when the pool
    /// exceeds its share.
    pub writeback_after: Option<Duration>,
    /// Have what stays cold leave though the limit has room for it, as long as programs do not wait for it.
    pub proactive: bool,
    /// Have the programs' library prepare forks also where the kernel reports them.
    pub prepare_forks: bool,
    /// The preload library's image (an ELF shared object), written to `runtime_dir`.
    pub agent_image: &'static [u8],
    /// Parent of the run's private directory (control socket, preload library), which has a random name
    /// and is removed when the supervisor stops. Unmanaged processes may keep its path in their
    /// `LD_PRELOAD`, so no other user may ever be able to create entries in `runtime_dir`.
    pub runtime_dir: PathBuf,
}
