//! Tests that run side by side: none judges whether a limit holds.

mod admission;
mod asked_twice;
mod capability;
pub mod crash;
mod debuggers;
pub mod departures;
mod few_descriptors;
mod growth;
mod harness;
mod helper;
mod inherited;
mod intruders;
mod leftovers;
mod live_control;
mod mappings;
mod observers;
mod own_userfaultfd;
mod pass_through;
mod processes;
mod redirected;
mod remote;
mod repeat;
mod stage_mapped_over;
pub mod tiers;
mod top;
mod words;
