//! Which mappings are registered, and the thread that decides it.

pub mod governor;
pub mod refused;
pub mod vma_scan;
