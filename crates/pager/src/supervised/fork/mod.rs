//! Forks: the child's page states, its PID, and pages that both sides share.

pub mod apply;
pub mod dedup;
pub mod expected_children;
pub mod family;
#[cfg(not(simulated))]
pub mod find_child;
pub mod identify;
pub mod inheritance;
pub mod prepared;
pub mod reconcile;
#[cfg(not(simulated))]
pub mod shared_counter;
pub mod shared_estimate;
pub mod snapshot;
pub mod stash;
pub mod withheld;
