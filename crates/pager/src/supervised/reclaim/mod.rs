//! Page-out: victims, batches through the stage, and the reclaimer thread.

pub(crate) mod accesses;
#[cfg(not(simulated))]
pub(crate) mod affinity;
pub(crate) mod batch;
pub(crate) mod crew;
pub(crate) mod priority;
#[cfg(not(simulated))]
pub(crate) mod proactive;
pub(crate) mod reclaimer;
pub(crate) mod round;
pub(crate) mod stage;
pub(crate) mod turns;
pub(crate) mod watermarks;
