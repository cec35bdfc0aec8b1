//! What files of `/proc` say.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_sys::fuzzing::proc_files(input));
