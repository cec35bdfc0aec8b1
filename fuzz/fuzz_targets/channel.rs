//! The supervisor's end of a channel, while the program writes over its own.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_sys::fuzzing::channel(input));
