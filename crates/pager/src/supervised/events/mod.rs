//! Userfaultfd events of munmap, mremap and madvise.

pub mod apply;
pub mod read;
pub mod recent_remove;
pub mod reorder;
