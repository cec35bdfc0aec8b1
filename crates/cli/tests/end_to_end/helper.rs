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

/// The kernel ends only the thread that makes it, and the process with its last.
#[test]
fn a_forbidden_system_call_is_told_as_the_signal_it_is() {
    for (mode, signal) in [("forbidden", 9), ("filtered", 31)] {
        let Some(outcome) = run(mode, "32") else {
            return;
        };
        assert_eq!(outcome.code(), 128 + signal, "{mode}: {}", outcome.errors);
        assert_eq!(outcome.text(), "");
    }
}

fn ends_well(mode: &str, megabytes: &str, said: &str) -> Option<Outcome> {
    let outcome = run(mode, megabytes)?;
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{said} ok\n"), "{}", outcome.errors);
    Some(outcome)
}

#[test]
fn children_without_room_for_a_helper_have_what_they_inherited() {
    ends_well("room", "20", "no room");
    ends_well("descriptors", "20", "no descriptors");
}

#[test]
fn children_out_of_the_supervisors_reach_have_what_they_inherited() {
    ends_well("network", "20", "another network");
}

#[test]
fn a_program_executed_under_a_filter_runs_on() {
    if !available("a filter", &["cc", "echo"]) {
        return;
    }
    let _guard = alone();
    let program = helper("execute", "20").args(["/bin/echo", "executed"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "executed\n");
}

#[test]
fn locked_memory_stays() {
    if let Some(outcome) = ends_well("locked", "24", "locked") {
        assert!(outcome.number("pages_out") < 100.0, "{}", outcome.errors);
    }
    ends_well("late", "32", "late");
}

#[test]
fn the_helper_keeps_no_privileges() {
    ends_well("privileges", "1", "privileges");
}

#[test]
fn a_program_can_enter_a_mount_namespace() {
    ends_well("mounts", "32", "mounts");
}

#[test]
fn a_program_under_valgrind_runs_unmanaged() {
    if !available("valgrind", &["valgrind", "echo"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new("valgrind").args(["-q", "echo", "seen"]);
    let outcome = program.run(Limits::Total(256 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "seen\n");
}
