//! What a helper says when it connects.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_sys::fuzzing::hello(input));
