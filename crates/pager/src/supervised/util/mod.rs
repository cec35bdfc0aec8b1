//! Small types that several threads use.

pub mod fd_pressure;
pub mod held_up;
pub mod run_time;
pub mod tracers;
