//! Feeds sequences of operations to a pool; see the shared interpreter.
#![no_main]

#[path = "../../tests/common/operations.rs"]
mod operations;

libfuzzer_sys::fuzz_target!(|input: &[u8]| operations::run(input));
