//! Where the migrations of a space continue.

use crate::{page::Page, slot::Slot};

/// Where migrations have got to, and their buffers.
#[derive(Debug, Default)]
pub(crate) struct Migrator {
    /// The cluster that the next scan begins with.
    pub(crate) next: u32,
    /// The cluster that the next write-back begins with.
    pub(crate) next_written: u32,
    pub(crate) pages: Vec<Page>,
    pub(crate) candidates: Vec<Slot>,
}
