//! Fault service, from the userfaultfd message to the page: one file for each kind of fault.

pub(crate) mod claim;
pub(crate) mod cow;
pub(crate) mod deferred;
pub(crate) mod handler;
#[cfg(not(simulated))]
pub(crate) mod listen;
pub(crate) mod message;
pub(crate) mod primitives;
pub(crate) mod readahead;
pub(crate) mod remote;
#[cfg(not(simulated))]
pub(crate) mod remote_thread;
pub(crate) mod room;
pub(crate) mod serve;
pub(crate) mod service;
pub(crate) mod stage_return;
pub(crate) mod swap_in;
pub(crate) mod zero_fill;
