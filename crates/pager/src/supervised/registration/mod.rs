//! Registration: which mappings are registered with a userfaultfd, and the governor, which decides
//! that.

#[cfg(not(simulated))]
pub(crate) mod governor;
pub(crate) mod refused;
pub(crate) mod register;
pub(crate) mod vma_scan;
