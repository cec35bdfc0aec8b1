//! Short cases, one hundred runs a round: none may hang or fail.

use crate::support::{Limits, MIB, Program, compiled, python, rounds, source, torture};
use std::time::Duration;

#[test]
fn a_hundred_short_runs_a_round_end_well() {
    beside!(&["cc", "python3"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    let small = Limits::Resident(16 * MIB);
    let verify = Program::new(compiled("verify", &["verify.c"], &[]))
        .args(["40", "2"])
        .arg(&result);
    let forktree = Program::new(compiled("forktree", &["forktree.c"], &[])).arg("24");
    let torture =
        Program::new(torture()).args(["--seconds", "1", "--megabytes", "32", "--threads", "3"]);
    let cases = [
        (verify.clone(), small),
        (forktree, small),
        (torture, Limits::Resident(20 * MIB)),
        (
            Program::new(python()).arg(source("objects.py")).arg("0.25"),
            small,
        ),
        (verify, Limits::Total(36 * MIB)),
        (Program::new("true"), Limits::Total(32 * MIB)),
        (
            Program::new("sh").args(["-c", "true & true | true; wait"]),
            Limits::Total(32 * MIB),
        ),
    ];
    for run in 0..100 * rounds() as usize {
        let (program, limits) = &cases[run % cases.len()];
        let outcome = program
            .clone()
            .timeout(Duration::from_secs(60))
            .run(*limits);
        assert!(
            outcome.status.success(),
            "run {run}: {}\n{}\n{}",
            outcome.status,
            outcome.text(),
            outcome.errors
        );
    }
}
