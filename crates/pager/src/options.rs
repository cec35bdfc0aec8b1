//! Options of a supervisor.

use memfold_swap::{Algorithm, RemoteTier};
use memfold_sys::probe::Managed;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
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

/// The share of the memory which programs use that stays resident where the limit cannot be held, as
/// the pool alone is larger than it.
///
/// ```
/// use memfold_pager::Floor;
/// assert_eq!(Floor::new(10).unwrap().of(2000), 200);
/// assert!(Floor::new(101).is_none());
/// assert_eq!("10%".parse::<Floor>().unwrap().percent(), 10);
/// assert!("a tenth".parse::<Floor>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Floor {
    percent: u8,
}

impl Floor {
    /// A floor in percent; `None` above 100.
    pub fn new(percent: u8) -> Option<Floor> {
        (percent <= 100).then_some(Floor { percent })
    }

    /// In percent.
    pub fn percent(self) -> u8 {
        self.percent
    }

    /// This share of a number of bytes.
    pub fn of(self, bytes: u64) -> u64 {
        bytes / 100 * u64::from(self.percent)
    }
}

/// The default. Less thrashes, more takes memory for little time (docs/measurements.md, "Limits that cannot
/// be held").
impl Default for Floor {
    fn default() -> Floor {
        Floor { percent: 20 }
    }
}

/// As `--floor` takes it: `10%`.
impl fmt::Display for Floor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}%", self.percent)
    }
}

/// A text is no floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("give a percentage of at most 100, such as 10%, or 0% for none")]
#[non_exhaustive]
pub struct ParseFloorError;

/// A whole percentage, with or without its sign.
impl FromStr for Floor {
    type Err = ParseFloorError;

    fn from_str(text: &str) -> Result<Floor, ParseFloorError> {
        let number = text.strip_suffix('%').unwrap_or(text);
        let floor = number.parse().ok().and_then(Floor::new);
        floor.ok_or(ParseFloorError)
    }
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
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Options {
    /// The group's limit.
    pub limit: Limit,
    /// What stays resident where the limit cannot be held.
    pub floor: Floor,
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
    /// Ask the kernel which pages are accessed, where it tells (Linux 7.3): fewer evicted pages refault. Copies after forks then
    /// do not wait at the limit.
    pub track_accesses: bool,
    /// Whose pages are taken away, on which bugs of `UFFDIO_MOVE` depend.
    pub managed: Managed,
    /// The preload library's image (an ELF shared object), written to `runtime_dir`.
    pub agent_image: &'static [u8],
    /// Parent of the run's private directory (control socket, preload library), which has a random name
    /// and is removed when the supervisor stops. Unmanaged processes may keep its path in their
    /// `LD_PRELOAD`, so no other user may ever be able to create entries in `runtime_dir`.
    pub runtime_dir: PathBuf,
}
