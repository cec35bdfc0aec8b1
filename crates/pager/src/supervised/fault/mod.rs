//! Fault service, from the userfaultfd message to the page: one file for each kind of fault.

pub mod claim;
pub mod cow;
pub mod deferred;
pub mod handler;
#[cfg(not(simulated))]
pub mod listen;
pub mod message;
pub mod primitives;
pub mod readahead;
pub mod remote;
#[cfg(not(simulated))]
pub mod remote_thread;
pub mod room;
pub mod serve;
pub mod service;
pub mod stage_return;
pub mod swap_in;
pub mod zero_fill;
