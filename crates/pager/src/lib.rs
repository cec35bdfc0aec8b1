//! Address spaces, fault service and reclaim for memfold.
//!
//! The pager sits between programs and the swap space: it serves their page faults, follows their
//! munmap, mremap, madvise and fork, and keeps a group of them under its limit. `docs/design.md` in
//! the repository defines the page states and the lock order.
//!
//! | module | holds |
//! |---|---|
//! | `supervised` | programs in other processes: `memfold run` |
//! | [`embedded`] | regions in the own process: the `memfold` library |
//! | `page`, `range_set` | page numbers, ranges, sets of ranges |
//! | `page_state`, `page_table` | the state of one page; the radix tree of states |
//! | `replacement` | which resident pages leave first |
//! | `replay` | memory that replays page traces |
//! | `density` | how much of a block of pages is resident, for readahead |
//! | `bugs` | switches by which the simulation puts past bugs back |
//! | `backoff` | relaxing the limit when reclaim makes no progress |
//! | `pool_memory` | memory for the pool |
//! | `statistics` | the table that each statistic is a line of |
//! | `size` | sizes as users write them |
//! | `options` | limits and settings, for both engines |
//! | `cpu_waiting` | whether CPUs are idle |
//! | `sync`, `time` | locking and waking; the clock |

#![cfg_attr(
    simulated,
    allow(dead_code, reason = "the simulation runs the core alone")
)]

mod backoff;
#[cfg(simulated)]
pub mod bugs;
#[cfg(not(simulated))]
#[allow(unreachable_pub, reason = "tests of the simulation use them")]
mod bugs;
mod cpu_waiting;
mod density;
#[cfg(not(simulated))]
pub mod embedded;
/// Entry points of the fuzz targets, which tests also run on `fuzz/corpus`.
#[cfg(all(any(test, feature = "fuzzing"), not(simulated)))]
#[doc(hidden)]
pub mod fuzzing;
mod options;
mod page;
mod page_state;
mod page_table;
mod pool_memory;
mod range_set;
mod replacement;
#[cfg(all(any(test, feature = "replay"), not(simulated)))]
#[doc(hidden)]
pub mod replay;
#[cfg(simulated)]
pub mod simulation;
mod size;
mod statistics;
mod supervised;
mod sync;
mod time;
mod watermarks;
mod zeros;

pub use cpu_waiting::CpuWaiting;
pub use memfold_swap::{Algorithm, ParseAlgorithmError};
pub use options::{
    Floor, Limit, Options, ParseFloorError, Recompress, RemoteOptions, SwapFileOptions,
};
#[cfg(not(simulated))]
pub use pool_memory::MappedSource;
pub use size::{Size, SizeError};
pub use statistics::StatsField;
pub use supervised::comfort::COMFORTABLE_SHARE;
#[cfg(not(simulated))]
pub use supervised::helper::inject::{AttachError, Attacher, DetachError};
pub use supervised::latency::LatencyCounts;
#[cfg(not(simulated))]
pub use supervised::mappings::MappingUsage;
#[cfg(not(simulated))]
pub use supervised::start_error::StartError;
pub use supervised::stats::{FaultLatency, Now, ProgramUsage, Stats, Totals};
#[cfg(not(simulated))]
pub use supervised::supervisor::{CONTROL, Change, Control, Supervisor};
#[cfg(not(simulated))]
pub use supervised::swap::tiers::{SwapFileError, SwapOffError, open_swap_file};
