//! The helper thread in a program's company: it does not keep a program from ending, and a program
//! that cannot have one, or forbids what it does, runs on.

use crate::support::{Limits, MIB, Outcome, Program, alone, available, compiled};
use std::time::Duration;

fn helper(mode: &str, megabytes: &str) -> Program {
    Program::new(compiled("helper", &["helper.c"], &["-pthread"]))
        .args([mode, megabytes])
        .timeout(Duration::from_secs(60))
}

fn run(mode: &str, megabytes: &str) -> Option<Outcome> {
    if !available(mode, &["cc"]) {
        return None;
    }
    let _guard = alone();
    Some(helper(mode, megabytes).run(Limits::Resident(16 * MIB)))
}

#[test]
fn programs_whose_threads_end_one_by_one_end() {
    for mode in ["exit", "strict", "last"] {
        let Some(outcome) = run(mode, "32") else {
            return;
        };
        assert_eq!(outcome.code(), 3, "{mode}: {}", outcome.errors);
        assert_eq!(outcome.text(), "");
    }
}
