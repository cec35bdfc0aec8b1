//! Where the migrations of a space continue.

use crate::{page::Page, slot::Slot};

/// The position and buffers of migrations.
#[derive(Debug, Default)]
pub(crate) struct Migrator {
    /// The cluster at which the next scan starts.
    pub(crate) next: u32,
    /// The cluster at which the next write-back starts.
    pub(crate) next_written: u32,
    pub(crate) pages: Vec<Page>,
    pub(crate) candidates: Vec<Slot>,
}
