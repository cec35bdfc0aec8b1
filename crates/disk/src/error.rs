//! Errors.

use memfold_swap::LoadError;

/// Why a disk could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NewDiskError {
    /// The size is not a multiple of a block, zero, or too large.
    #[error("the size of a disk must be a multiple of 4096 bytes, from 4096 bytes to 1 PiB")]
    Size,
    /// A thread that works for the disk could not be started.
    #[error("a thread of the disk could not be started; raise `ulimit -u`")]
    Thread,
    /// The swap space has a file already.
    #[error("the swap space has a file already")]
    File,
}

/// Why a request to a disk failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The range is not inside the disk.
    #[error("the range is beyond the end of the disk")]
    OutOfRange,
    /// The limit is reached, or the swap space has no room. Blocks before the first one without room may
    /// have been written; every other block has its old contents.
    #[error("the disk's memory is full; discard blocks, or raise its limit")]
    NoSpace,
    /// A block could not be read back.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// Why a swap file is still in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwapOffError {
    /// The disk has no swap file.
    #[error("this disk has no swap file")]
    NoFile,
    /// The blocks do not fit under the limit.
    #[error(
        "{blocks} blocks of the swap file do not fit into 7/8 of the limit; the file stays in use (discard \
         blocks first, or keep it)"
    )]
    NoRoom {
        /// Blocks that are still in the file.
        blocks: u64,
    },
    /// Some blocks cannot be read or stored now.
    #[error("{blocks} blocks of the swap file cannot be read or stored now; the file stays in use")]
    Unreadable {
        /// Blocks that are still in the file.
        blocks: u64,
    },
}
