//! The helper thread of a program: its admission, its take-over, its end.

#[cfg(not(simulated))]
pub(crate) mod accept;
#[cfg(not(simulated))]
pub(crate) mod admission;
#[cfg(not(simulated))]
mod candidate;
#[cfg(not(simulated))]
pub(crate) mod discard;
#[cfg(not(simulated))]
mod forked;
#[cfg(not(simulated))]
pub(crate) mod guests;
#[cfg(not(simulated))]
pub(crate) mod inject;
#[cfg(not(simulated))]
pub(crate) mod late;
#[cfg(not(simulated))]
mod newcomers;
#[cfg(not(simulated))]
pub(crate) mod patched;
#[cfg(not(simulated))]
pub(crate) mod peer;
#[cfg(not(simulated))]
pub(crate) mod pending;
#[cfg(not(simulated))]
pub(crate) mod released;
pub(crate) mod takeover;
