//! The helper thread in a program's company: it does not keep a program from ending, and a program
//! that cannot have one, or forbids what it does, runs on.

use super::admission::public_copy;
use crate::support::{Limits, MIB, Outcome, Program, compiled};
use std::time::Duration;

fn helper(mode: &str, megabytes: &str) -> Program {
    Program::new(compiled("helper", &["helper.c"], &["-pthread"]))
        .args([mode, megabytes])
        .timeout(Duration::from_secs(60))
}

fn run(mode: &str, megabytes: &str) -> Outcome {
    helper(mode, megabytes).run(Limits::Resident(16 * MIB))
}

#[test]
fn programs_whose_threads_end_one_by_one_end() {
    beside!(&["cc"]);
    for mode in ["exit", "strict", "last"] {
        let outcome = run(mode, "32");
        assert_eq!(outcome.code(), 3, "{mode}: {}", outcome.errors);
        assert_eq!(outcome.text(), "");
    }
}

/// The kernel ends only the thread that makes it, and the process with its last.
#[test]
fn a_forbidden_system_call_is_told_as_the_signal_it_is() {
    beside!(&["cc"]);
    for (mode, signal) in [("forbidden", 9), ("filtered", 31)] {
        let outcome = run(mode, "32");
        assert_eq!(outcome.code(), 128 + signal, "{mode}: {}", outcome.errors);
        assert_eq!(outcome.text(), "");
    }
}

fn ends_well(mode: &str, megabytes: &str, said: &str) -> Outcome {
    let outcome = run(mode, megabytes);
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{said} ok\n"), "{}", outcome.errors);
    outcome
}

#[test]
fn children_without_room_for_a_helper_have_what_they_inherited() {
    beside!(&["cc"]);
    ends_well("room", "20", "no room");
    ends_well("descriptors", "20", "no descriptors");
}

#[test]
fn children_out_of_the_supervisors_reach_have_what_they_inherited() {
    beside!(&["cc"]);
    ends_well("network", "20", "another network");
}

#[test]
fn a_program_executed_under_a_filter_runs_on() {
    beside!(&["cc", "echo"]);
    let program = helper("execute", "20").args(["/bin/echo", "executed"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "executed\n");
}

#[test]
fn locked_memory_stays() {
    beside!(&["cc"]);
    let outcome = ends_well("locked", "24", "locked");
    assert!(outcome.number("pages_out") < 100.0, "{}", outcome.errors);
    ends_well("late", "32", "late");
}

#[test]
fn the_helper_has_a_name_of_its_own() {
    beside!(&["sh"]);
    let script = "cat /proc/self/comm /proc/$$/comm /proc/$$/task/*/comm";
    let program = Program::new("sh").args(["-c", script]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "cat\nsh\nsh\nmemfold\n");
}

#[test]
fn the_helper_keeps_no_privileges() {
    beside!(&["cc"]);
    ends_well("privileges", "1", "privileges");
    ends_well("effective", "1", "privileges");
}

/// What has capabilities, but none to change its user, has a helper with the same ones. What the program drops and touches
/// again afterwards counts once.
#[test]
fn a_helper_ends_when_its_program_gives_up_capabilities() {
    beside!(&["cc", "setpriv"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let program = compiled("helper", &["helper.c"], &["-pthread"]);
    let program = public_copy(&program, folder.path());
    let outcome = Program::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups"])
        .args(["--inh-caps", "+net_raw", "--ambient-caps", "+net_raw"])
        .arg(program)
        .args(["follow", "8"])
        .timeout(Duration::from_secs(60))
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "follow ok\n", "{}", outcome.errors);
    let peak = outcome.number("peak_resident_bytes") as u64;
    assert!(peak < 32 * MIB, "{} MiB", peak / MIB);
}

/// It would get no time beside a real-time thread that is busy.
#[test]
fn the_helper_is_an_ordinary_thread_where_memfold_may_run() {
    beside!(&["cc"]);
    ends_well("ordinary", "1", "ordinary");
}

#[test]
fn a_program_can_enter_a_mount_namespace() {
    beside!(&["cc"]);
    ends_well("mounts", "32", "mounts");
}

#[test]
fn a_program_under_valgrind_runs_unmanaged() {
    beside!(&["valgrind", "echo"]);
    let program = Program::new("valgrind").args(["-q", "echo", "seen"]);
    let outcome = program.run(Limits::Total(256 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "seen\n");
}
