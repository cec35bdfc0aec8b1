//! Page-out: victims, batches through the stage, and the thread that drives them.

pub mod affinity;
pub mod batch;
pub mod priority;
pub mod reclaimer;
pub mod stage;
