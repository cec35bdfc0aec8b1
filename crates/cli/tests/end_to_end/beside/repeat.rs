//! Short cases, again and again: none may hang or fail.

use crate::support::{
    LEAST_RESIDENT, Limits, MIB, Program, compiled, python, rounds, short_or_long, source, torture,
};
use std::time::Duration;

fn ends_well_each_time(program: Program, limits: Limits) {
    let program = program.timeout(Duration::from_secs(60));
    // More runs find rarer races.
    for run in 0..short_or_long(3, 7 * rounds()) {
        let outcome = program.run(limits);
        assert!(
            outcome.status.success(),
            "run {run}: {}\n{}\n{}",
            outcome.status,
            outcome.text(),
            outcome.errors
        );
    }
}

fn verifies(limits: Limits) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = Program::new(compiled("verify", &["verify.c"], &[]))
        .args(["40", "2"])
        .arg(folder.path().join("result"));
    ends_well_each_time(program, limits);
}

#[test]
fn a_program_verifies_a_resident_limit() {
    beside!(&["cc"]);
    verifies(Limits::Resident(LEAST_RESIDENT));
}

#[test]
fn a_program_verifies_a_limit_on_everything() {
    beside!(&["cc"]);
    verifies(Limits::Total(36 * MIB));
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn forks_end_well() {
    beside!(&["cc"]);
    let program = Program::new(compiled("forktree", &["forktree.c"], &[])).arg("24");
    ends_well_each_time(program, Limits::Resident(LEAST_RESIDENT));
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn torture_ends_well() {
    beside!(&["cc"]);
    let program =
        Program::new(torture()).args(["--seconds", "1", "--megabytes", "32", "--threads", "3"]);
    ends_well_each_time(program, Limits::Resident(20 * MIB));
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn python_ends_well() {
    beside!(&["python3"]);
    let program = Program::new(python()).arg(source("objects.py")).arg("0.25");
    ends_well_each_time(program, Limits::Resident(LEAST_RESIDENT));
}

#[test]
fn what_ends_at_once_ends_well() {
    beside!(&["sh", "true"]);
    let limits = Limits::Total(32 * MIB);
    ends_well_each_time(Program::new("true"), limits);
    let shell = Program::new("sh").args(["-c", "true & true | true; wait"]);
    ends_well_each_time(shell, limits);
}
