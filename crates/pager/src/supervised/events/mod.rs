//! Userfaultfd events of munmap, mremap and madvise.

pub(crate) mod apply;
pub(crate) mod read;
pub(crate) mod recent_remove;
pub(crate) mod reorder;
