//! The helper thread of a program: its admission, its take-over, its end.

#[cfg(not(simulated))]
pub mod accept;
#[cfg(not(simulated))]
pub mod admission;
#[cfg(not(simulated))]
pub mod discard;
#[cfg(not(simulated))]
pub mod peer;
#[cfg(not(simulated))]
pub mod pending;
pub mod takeover;
