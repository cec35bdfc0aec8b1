//! How an engine is set up.

use super::remote_queue::Remote;
use crate::options::Limit;
use memfold_swap::Algorithm;

/// How faults on regions are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum Mode {
    /// In the faulting thread, by a SIGBUS handler (userfaultfd). The fastest. A system call that is
    /// given a missing page fails with `EFAULT`.
    Signal,
    /// By a thread of the engine (userfaultfd). System calls work on missing pages. A fault costs two
    /// context switches more.
    Thread,
    /// In the faulting thread, by a SIGSEGV handler, without userfaultfd: missing pages are made
    /// inaccessible by `mprotect`. Swap-in and page-out work on blocks of 16 pages or more. A system
    /// call that is given a missing page fails with `EFAULT`.
    Protection,
}

impl Mode {
    /// A short name, stable across versions: `signal`, `thread`, `protection`.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Signal => "signal",
            Mode::Thread => "thread",
            Mode::Protection => "protection",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What an engine is made with.
#[derive(Debug, Clone)]
pub struct Config {
    /// How much memory the engine may use.
    pub limit: Limit,
    /// The compression algorithm of the pool.
    pub algorithm: Algorithm,
    /// Whether a checksum is kept for each stored page and verified on swap-in.
    pub checksum: bool,
    /// The mode to use. `None`: [`Mode::Signal`] where the host allows userfaultfd, else
    /// [`Mode::Protection`].
    pub mode: Option<Mode>,
    /// Whether pages are brought in before they are touched: ahead of sequential and strided streams
    /// by a thread, and around dense random accesses while there is ample room. Not in
    /// [`Mode::Protection`].
    pub readahead: bool,
    /// Where pages go that do not fit into half of the limit. Not in [`Mode::Protection`].
    pub remote: Option<Remote>,
}
