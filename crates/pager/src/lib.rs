//! Address spaces, fault service and reclaim for memfold.
//!
//! The pager stands between programs and the swap space: it serves their page faults, notices
//! what they map, unmap, move and fork, and keeps a group of them under its limit. See
//! `docs/design.md` in the repository for the page states and the lock order.

mod options;
mod stats;

pub use options::{Algorithm, Limit, Options};
pub use stats::{FaultLatency, Stats};
