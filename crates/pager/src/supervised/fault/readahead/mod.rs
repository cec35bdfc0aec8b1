//! Readahead: which neighbours of a faulting page are brought in with it.

pub(crate) mod fault_around;
pub(crate) mod sequential;
