//! `madvise` events of an address space.

use crate::supervised::events::recent_remove::RecentRemovals;
use crate::sync::Mutex;
use std::sync::atomic::AtomicU32;

/// `madvise` events (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`) of one program.
#[derive(Default)]
pub(crate) struct Removals {
    /// Number of events.
    pub count: AtomicU32,
    /// Recent events on ranges that were not managed.
    pub unmanaged: Mutex<RecentRemovals>,
}
