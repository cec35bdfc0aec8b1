//! Tests that judge whether a limit holds, or how long something takes: one at a time.

mod comfort;
mod crash;
mod departures;
mod floor;
mod growth;
mod host_swap;
mod kernels;
mod late;
mod processes;
mod programs;
mod redis;
mod tiers;
mod torture;
