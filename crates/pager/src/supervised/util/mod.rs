//! Small types that several threads use.

pub(crate) mod fd_pressure;
pub(crate) mod run_time;
pub(crate) mod tracers;
