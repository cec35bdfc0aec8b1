//! Programs that register memory with a userfaultfd of their own, where memfold has it.

use crate::support::{Limits, MIB, Program, compiled};
use std::time::Duration;

fn registers(mode: &str, limits: Limits) {
    let program = Program::new(compiled("registers", &["registers.c"], &["-pthread"]))
        .args([mode, "48"])
        .timeout(Duration::from_secs(60));
    let outcome = program.run(limits);
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{mode} ok\n"), "{}", outcome.errors);
    assert!(
        outcome.number("pages_out") > 2000.0,
        "hardly anything was out when it was registered"
    );
}

#[test]
fn memory_that_is_partly_out_can_be_registered_whole() {
    beside!(&["cc"]);
    registers("missing", Limits::Resident(16 * MIB));
    registers("missing", Limits::Total(40 * MIB));
}

#[test]
fn a_collector_finds_the_pages_it_wrote_to() {
    beside!(&["cc"]);
    registers("protected", Limits::Resident(16 * MIB));
    registers("protected", Limits::Total(16 * MIB));
}

#[test]
fn several_threads_register_at_once() {
    beside!(&["cc"]);
    registers("threads", Limits::Resident(16 * MIB));
}

#[test]
fn what_is_missing_is_the_programs_once_it_is_registered() {
    beside!(&["cc"]);
    registers("faults", Limits::Resident(16 * MIB));
}
