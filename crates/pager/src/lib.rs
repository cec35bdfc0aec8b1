//! Address spaces, fault service and reclaim for memfold.
//!
//! The pager stands between programs and the swap space: it serves their page faults, notices
//! what they map, unmap, move and fork, and keeps a group of them under its limit. See
//! `docs/design.md` in the repository for the page states and the lock order.

mod address_space;
mod admission;
mod around;
mod attendant;
mod concession;
mod deferred;
mod density;
mod discard;
mod dropped;
pub mod embedded;
mod events;
mod fault;
mod fork;
mod gate;
mod governor;
mod group;
mod halt;
mod handler;
mod latency;
mod meeting;
mod memory;
mod moment;
mod mover;
mod newcomers;
mod options;
mod order;
mod page;
mod reclaim;
mod refused;
mod regions;
mod relief;
mod sentinel;
mod shared_pages;
mod sharing;
mod sharing_count;
mod shortage;
#[cfg(test)]
mod skip;

/// What the fuzz targets run on their input, and tests on what lies in `fuzz/corpus`.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod stage;
mod standing;
mod state;
mod stats;
mod steering;
mod supervisor;
mod survey;
mod swap_file;
mod swap_in;
mod sweep;
mod table;
mod tiers;
mod victims;
mod waited;
mod window;
mod write_protect;

pub use options::{Algorithm, Limit, Options, SwapFileOptions};
pub use stats::{FaultLatency, ProgramUsage, Stats};
pub use supervisor::{Control, StartError, Supervisor};
pub use tiers::{SwapFileError, SwapOffError};
