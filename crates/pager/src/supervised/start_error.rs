//! Why a supervisor cannot start.

use crate::supervised::swap::tiers::SwapFileError;
use memfold_swap::NewSwapSpaceError;
use memfold_sys::Errno;
use std::io;
use std::path::PathBuf;

/// A supervisor could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The run's directory, or a file in it, could not be made.
    #[error("cannot prepare {path}: {source}")]
    Directory {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket's path does not fit into a socket address.
    #[error("the path {0} is too long for a socket; set TMPDIR to a folder with a shorter path")]
    PathTooLong(PathBuf),
    /// The preload library's image lacks the mark that the supervisor patches.
    #[error("the preload library inside this program is damaged; install memfold again")]
    Image,
    /// The pool's address space could not be reserved.
    #[error(
        "cannot reserve address space for a pool of {0} MiB; raise the address-space limit \
         (ulimit -v), set vm.overcommit_memory to 0 or 1, or give a smaller --limit"
    )]
    AddressSpace(usize),
    /// The pool could not be made.
    #[error("cannot set up the swap space: {0}")]
    Swap(#[from] NewSwapSpaceError),
    /// The swap file could not be made.
    #[error(transparent)]
    SwapFile(#[from] SwapFileError),
    /// Copies of pages in a store are to be kept in a swap file that there is not.
    #[error(
        "copies of remote pages are kept in the swap file; give --swap-file and --swap-size, too"
    )]
    NoFileForCopies,
    /// The kernel has no way to take pages of a program away.
    #[error(
        "this kernel neither moves pages (UFFDIO_MOVE) nor takes them away by mremap ({0}); boot Linux 5.14 or newer"
    )]
    NoMover(Errno),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}
