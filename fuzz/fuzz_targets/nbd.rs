//! What a client of the block device says.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_disk::fuzzing::nbd(input));
