//! `memfold serve` with the clients that people use, virtual machines among them. None of it needs root.
#![allow(
    unreachable_pub,
    reason = "nothing in a program is reachable from outside"
)]

mod clients;
mod instances;
mod machines;
mod raw_client;
mod stores;
mod support;
