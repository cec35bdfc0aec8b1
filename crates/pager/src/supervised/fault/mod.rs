//! From a message to a page in place: one file for each kind of fault.

pub mod cow;
pub mod deferred;
pub mod handler;
pub mod readahead;
pub mod serve;
pub mod swap_in;
