//! Readahead: which neighbours of a faulting page are brought in with it.

pub mod fault_around;
pub mod sequential;
