//! What a store on other machines answers, and returns in place of pages.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_remote::fuzzing::answers(input));
