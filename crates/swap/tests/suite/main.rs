//! The swap space from outside. One binary: each further one would link the crate again.
#![cfg(not(loom))]

mod behaviour;
mod blocks;
mod common;
mod file;
mod gather;
mod groups;
mod moving;
mod oracle;
mod remote;
mod threads;
