//! Pages that `madvise` dropped.

use crate::supervised::events::recent_remove::RecentRemovals;
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

/// `MADV_DONTNEED` and the like, of one program.
#[derive(Default)]
pub struct Removals {
    /// How many were reported.
    pub count: AtomicU32,
    /// The recent ones on ranges that were not managed.
    pub unmanaged: Mutex<RecentRemovals>,
}
