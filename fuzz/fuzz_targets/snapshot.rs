//! Answers to `memfold stat` and `memfold top`. The command is a program: its files are taken one by one.
#![no_main]
#![allow(
    dead_code,
    reason = "the command's files are whole; the target calls one function of them"
)]

#[path = "../../crates/cli/src/disk_report.rs"]
mod disk_report;
#[path = "../../crates/cli/src/format.rs"]
mod format;
#[path = "../../crates/cli/src/fuzzing.rs"]
mod fuzzing;
#[path = "../../crates/cli/src/instance.rs"]
mod instance;
#[path = "../../crates/cli/src/report.rs"]
mod report;
#[path = "../../crates/cli/src/summary.rs"]
mod summary;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzing::snapshot(input));
