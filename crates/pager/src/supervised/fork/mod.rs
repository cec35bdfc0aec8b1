//! Forks: the child's page states, its process, and what both sides share.

pub mod apply;
pub mod dedup;
pub mod find_child;
pub mod shared_counter;
pub mod shared_estimate;
pub mod snapshot;
