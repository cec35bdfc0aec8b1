//! Registration: which mappings are registered with a userfaultfd, and the governor, which decides
//! that.

#[cfg(not(simulated))]
pub mod governor;
pub mod refused;
pub mod register;
pub mod vma_scan;
