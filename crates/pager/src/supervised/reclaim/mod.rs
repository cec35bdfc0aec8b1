//! Page-out: victims, batches through the stage, and the reclaimer thread.

#[cfg(not(simulated))]
pub mod affinity;
pub mod batch;
pub mod priority;
pub mod reclaimer;
pub mod stage;
