//! What a helper says of a move.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_pager::fuzzing::outcome(input));
