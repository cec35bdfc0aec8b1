//! The clock of both engines. The simulation has one of its own.

#[cfg(simulated)]
pub(crate) use crate::simulation::time::{Instant, sleep, yield_now};
#[cfg(not(simulated))]
pub(crate) use std::time::Instant;

/// Sleeps at least so long.
#[cfg(not(simulated))]
pub(crate) fn sleep(duration: std::time::Duration) {
    std::thread::sleep(duration);
}

/// Lets other threads run on this CPU.
#[cfg(not(simulated))]
pub(crate) fn yield_now() {
    std::thread::yield_now();
}
