//! A disk of compressed memory.
//!
//! A [`Disk`] maps blocks of 4 KiB to slots of a [`SwapSpace`](memfold_swap::SwapSpace), as zram maps
//! the sectors of its disk to objects of a pool. [`nbd`] offers it to clients.
//!
//! ```
//! use memfold_disk::Disk;
//! use memfold_swap::{Scratch, SwapConfig, SwapSpace};
//! use zsmalloc::HeapSource;
//!
//! let config = SwapConfig { pool_capacity_pages: 4096, max_slots: 4096, ..Default::default() };
//! let space = SwapSpace::new(HeapSource::new(), config)?;
//! let disk = Disk::new(space, 1 << 30, 8 << 20)?;
//! let mut scratch = Scratch::new();
//!
//! disk.write(10_000, b"some bytes", &mut scratch)?;
//! let mut back = [0; 10];
//! disk.read(10_000, &mut back, &mut scratch)?;
//! assert_eq!(&back, b"some bytes");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`disk`] | reads and discards of byte ranges |
//! | `write` | writes |
//! | `block_map` | which slot holds a block |
//! | `discard` | freeing of discarded blocks in the background |
//! | `memory` | what blocks are kept in, and making room for them |
//! | `room` | the limit, and what is reserved below it |
//! | `swap_file` | the file, and the threads that wait while it is given up |
//! | `swap_off` | bringing blocks back from the swap file |
//! | `packing` | compressing cold blocks together with neighbours |
//! | `unpack` | storing hot blocks alone again |
//! | `pace` | how long a read takes |
//! | [`nbd`] | the protocol, connections, the server |
//!
//! The crate makes no system call of its own beside those of `std`: sockets are passed in.

mod block_map;
mod discard;
pub mod disk;
mod error;
/// Entry point of the fuzz target, which a test also runs on `fuzz/corpus`.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
pub mod nbd;
mod pace;
mod packing;
mod room;
mod swap_file;
mod swap_off;
mod sync;
mod unpack;
mod usage;
mod write;

pub use disk::{BLOCK, Disk, Extent, MAX_SIZE};
pub use error::{DiskError, NewDiskError, SwapOffError};
pub use packing::Host;
pub use usage::DiskUsage;
