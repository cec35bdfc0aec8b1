//! Programs that no memfold can hold run as without it, are named by `memfold run`, and refused by `memfold attach`.

use super::attach::{attach, text};
use crate::support::{Limits, MIB, Outcome, Program, STRANGER, Stage, compiled};
use std::path::PathBuf;
use std::process::{Command, Output};

const LIMIT: Limits = Limits::Total(64 * MIB);

/// What is said of a program that is outside the limit.
const NAMED: &str = "is not under the limit";

/// A 32-bit program, for which no 32-bit C library need be there.
#[cfg(target_arch = "x86_64")]
fn narrow() -> PathBuf {
    let options = ["-m32", "-nostdlib", "-static"];
    compiled("narrow", &["narrow.c"], &options)
}

/// A set-user-ID copy of `verify`, owned by root.
fn privileged(stage: &Stage) -> PathBuf {
    let program = stage.program(&compiled("verify", &["verify.c"], &[]), "privileged");
    stage.allow("privileged", 0o4755);
    program
}

/// It is the only one outside the limit, and memfold says in one line which it is and why.
fn assert_named(outcome: &Outcome, name: &str, why: &str) {
    assert_eq!(outcome.number("processes_unmanaged"), 1.0);
    let is_of_it = |line: &&str| line.contains(NAMED);
    let lines: Vec<&str> = outcome.errors.lines().filter(is_of_it).collect();
    let [line] = lines[..] else {
        panic!("{}", outcome.errors);
    };
    assert!(
        line.contains(&format!("{name} (PID ")) && line.ends_with(why),
        "{line}"
    );
}

fn assert_refused(output: &Output, pid: u32, why: &str) {
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{errors}");
    let start = format!("cannot attach PID {pid}: {why}");
    assert!(
        errors.contains(&start) && errors.lines().count() == 1,
        "{errors}"
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_32_bit_program_runs_untouched_and_is_named() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let go = folder.path().join("go");
    let mut run = Program::new(narrow()).arg(&go).start(LIMIT);
    run.wait_for_error(NAMED);
    std::fs::write(&go, "").expect("a file");
    let outcome = run.wait();
    assert_eq!(outcome.code(), 7, "{}", outcome.errors);
    assert_named(
        &outcome,
        "narrow",
        "it is not a 64-bit program; use a 64-bit build to have it held",
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_32_bit_program_is_not_attached() {
    beside!(&["cc"]);
    let mut program = Command::new(narrow());
    let mut program = program.arg("/no/such/file").spawn().expect("it starts");
    let output = attach(program.id()).wait_with_output().expect("it ends");
    let runs = program.try_wait().expect("a status").is_none();
    program.kill().expect("it is there");
    program.wait().expect("it ends");
    assert!(runs, "{}", text(&output.stderr));
    assert_refused(&output, program.id(), "it is not a 64-bit program");
}

#[test]
fn a_set_user_id_program_runs_untouched_and_is_named() {
    beside!(&["cc", "setpriv"]);
    let stage = Stage::new();
    let results = stage.path("results");
    let user = STRANGER.to_string();
    let program = Program::new("setpriv").args(["--reuid", &user, "--regid", &user]);
    let program = program.arg("--clear-groups").arg(privileged(&stage));
    let mut run = program.args(["16", "0"]).arg(&results).start(LIMIT);
    run.wait_for_error(NAMED);
    let outcome = run.terminate();
    outcome.assert_terminated();
    assert_named(
        &outcome,
        "privileged",
        "it runs with other privileges (set-user-ID or capabilities); start memfold with those \
         privileges to have it held",
    );
    let wrong = std::fs::read_to_string(&results).expect("its results");
    assert_eq!(wrong, "");
}

/// By the user who started it, but has fewer rights than it has.
#[test]
fn a_set_user_id_program_is_not_attached() {
    beside!(&["cc", "setpriv", "unshare"]);
    let stage = Stage::new();
    privileged(&stage);
    let user = format!("setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups");
    let output = stage.run(&format!(
        "{user} ./privileged 16 0 /tmp/results > /dev/null & \
         until grep -q privileged /proc/$!/comm; do sleep 0.01; done; \
         {user} ./memfold attach $!; status=$?; \
         kill $! || exit 1; echo $!; cat /tmp/results; exit $status"
    ));
    let pid = text(&output.stdout).trim().parse();
    let pid = pid.unwrap_or_else(|_| panic!("{output:?}"));
    assert_refused(&output, pid, "memfold may not trace it");
}
