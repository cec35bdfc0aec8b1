//! How an engine is set up, and what can go wrong.

use crate::options::{Algorithm, Limit};
use memfold_swap::NewError;
use std::io;

/// How faults on regions are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// In the faulting thread, by a handler of SIGBUS (userfaultfd). The fastest. A system call
    /// that is given a missing page answers `EFAULT`.
    Signal,
    /// By a thread of the engine (userfaultfd). System calls work on missing pages. A fault costs
    /// two switches of threads more.
    Thread,
    /// In the faulting thread, by a handler of SIGSEGV, without userfaultfd: access to missing
    /// pages is taken away by `mprotect`. Pages come and go in blocks of 16 and more.
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
    /// How much memory it may use.
    pub limit: Limit,
    /// The pool's algorithm.
    pub algorithm: Algorithm,
    /// Keep and verify a checksum a stored page.
    pub checksum: bool,
    /// The mode to use; `None` for [`Mode::Signal`] where the host allows it, and otherwise
    /// [`Mode::Protection`].
    pub mode: Option<Mode>,
    /// Whether pages are brought in before they are touched: ahead of sequential and strided
    /// accesses by a thread, and where there is ample room around those that are scattered densely.
    /// Not in [`Mode::Protection`].
    pub readahead: bool,
}

/// Why something could not be done. Nothing was changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// The limit is too small to work in.
    #[error("the limit of {bytes} bytes is too small: give at least {least}")]
    LimitTooSmall {
        /// What was given.
        bytes: u64,
        /// What is needed.
        least: u64,
    },
    /// The host does not allow the mode.
    #[error("this host does not allow {mode} mode: {why}; `memfold doctor` says what mends it")]
    ModeUnavailable {
        /// The mode.
        mode: Mode,
        /// What is missing.
        why: String,
    },
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The swap space could not be made.
    #[error(transparent)]
    Swap(#[from] NewError),
    /// A length of zero, or one that no address space has.
    #[error("a region cannot have {0} bytes")]
    Length(usize),
    /// A range that does not lie in the region.
    #[error("bytes {start}..{end} are not in a region of {length}")]
    OutOfRange {
        /// First byte.
        start: usize,
        /// First byte behind.
        end: usize,
        /// Bytes of the region.
        length: usize,
    },
    /// The pinned pages would not fit the limit.
    #[error("pinning {pages} more pages would exceed the limit")]
    TooMuchPinned {
        /// Pages that were to be pinned.
        pages: usize,
    },
    /// The calling process was forked from the one that the engine belongs to.
    #[error("regions are not inherited: this process was forked from the one that made them")]
    Forked,
}

impl EmbeddedError {
    pub(super) fn system(doing: &'static str) -> impl FnOnce(io::Error) -> EmbeddedError {
        move |source| EmbeddedError::System { doing, source }
    }
}
