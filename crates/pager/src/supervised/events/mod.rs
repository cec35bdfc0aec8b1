//! Changes of mappings that userfaultfd reports: unmap, remap, madvise.

pub mod apply;
pub mod recent_remove;
pub mod reorder;
