//! Small types that several threads use.

#[cfg(not(simulated))]
pub(crate) mod activity;
pub(crate) mod fd_pressure;
pub(crate) mod pace;
pub(crate) mod run_time;
pub(crate) mod tracers;
