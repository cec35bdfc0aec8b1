//! Small types that several threads use.

pub mod fd_pressure;
pub mod run_time;
pub mod tracers;
