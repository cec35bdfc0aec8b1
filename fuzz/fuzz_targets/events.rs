//! The order in which userfaultfd events are applied.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| memfold_pager::fuzzing::events(input));
