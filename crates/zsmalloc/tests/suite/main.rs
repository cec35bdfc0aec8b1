//! A pool from outside. One binary: each further one would link the crate again. `heap_refusal` needs an
//! allocator of its own.

#[path = "../common/mod.rs"]
mod common;
mod compact;
mod huge;
mod misuse;
mod oracle;
mod random_operations;
mod threads;
