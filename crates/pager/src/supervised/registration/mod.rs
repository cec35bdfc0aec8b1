//! Registration: which mappings are registered with a userfaultfd, and the governor, which decides
//! that.

pub mod governor;
pub mod refused;
pub mod vma_scan;
