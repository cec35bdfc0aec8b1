//! Errors of engines and regions.

use super::config::Mode;
use std::io;

/// Why a call failed. A call that fails changes nothing.
///
/// The text of the cause is not part of an error's own text: print the chain of
/// [`source`](std::error::Error::source), as `anyhow` does with `{:#}`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The limit is smaller than what an engine needs to make progress.
    #[error("the limit of {bytes} bytes is too small: give at least {least}")]
    LimitTooSmall {
        /// The limit that was given.
        bytes: u64,
        /// The smallest limit.
        least: u64,
    },
    /// The host does not allow the mode.
    #[error("this host does not allow {mode} mode: {why}; `memfold doctor` prints how to allow it")]
    ModeUnavailable {
        /// The mode.
        mode: Mode,
        /// What is missing.
        why: String,
    },
    /// The kernel refused a system call.
    #[error("cannot {action}")]
    System {
        /// What the call was for, as a verb phrase: `map a region`.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The compressed pool or its swap table could not be set up.
    #[error("cannot set up the compressed pool")]
    Pool(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A store on other machines cannot be used.
    #[error("cannot use the remote store")]
    Remote(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The options of a store on other machines contradict each other, or are out of range.
    #[error("the options of the remote store are invalid")]
    RemoteOptions(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The length of a region is zero, or larger than the address space.
    #[error("cannot map a region of {0} bytes: the length must be from 1 to 2^46")]
    Length(usize),
    /// The range is not within the region.
    #[error("bytes {start}..{end} are not in a region of {length}")]
    OutOfRange {
        /// Offset of the first byte.
        start: usize,
        /// Offset behind the last byte.
        end: usize,
        /// Bytes of the region.
        length: usize,
    },
    /// The limit has no room for the pinned pages.
    #[error("cannot pin {pages} more pages: the limit leaves no room for them")]
    TooMuchPinned {
        /// Pages that were to be pinned.
        pages: usize,
    },
    /// The calling process is a forked child of the one that made the engine.
    #[error("this process was forked from the one that mapped the region: make a limit of its own")]
    Forked,
}

impl Error {
    pub(super) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { action, source }
    }
}
