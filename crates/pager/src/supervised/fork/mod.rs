//! Forks: the child's page states, its PID, and pages that both sides share.

pub(crate) mod apply;
pub(crate) mod dedup;
pub(crate) mod expected_children;
pub(crate) mod family;
#[cfg(not(simulated))]
pub(crate) mod find_child;
pub(crate) mod identify;
pub(crate) mod inheritance;
pub(crate) mod prepared;
pub(crate) mod reconcile;
pub(crate) mod shared_bounds;
#[cfg(not(simulated))]
pub(crate) mod shared_counter;
pub(crate) mod shared_estimate;
pub(crate) mod snapshot;
pub(crate) mod staged;
pub(crate) mod unapplied;
pub(crate) mod withheld;
