//! Programs that begin without a helper, as the group has room, and get one once they have grown.

use crate::support::{Limits, MIB, Outcome, Program, compiled, rounds};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// With room enough for programs to wait, and too small for what the tests need.
const LIMIT: Limits = Limits::Resident(512 * MIB);

/// Under a shell, which the run starts itself and which therefore has a helper from the first.
fn below_a_shell(script: &str, arguments: &[&str], options: &[&str]) -> Outcome {
    program_below_a_shell(script, arguments, options).run(LIMIT)
}

fn program_below_a_shell(script: &str, arguments: &[&str], options: &[&str]) -> Program {
    Program::new("sh")
        .args(["-c", script])
        .arg(compiled("late", &["late.c"], &["-pthread"]))
        .args(arguments)
        .memfold_options(options)
        .timeout(Duration::from_secs(120))
}

fn late(arguments: &[&str], options: &[&str]) -> Outcome {
    let outcome = below_a_shell("sleep 0.1; \"$0\" \"$@\"; exit $?", arguments, options);
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{} ok\n", arguments[0]));
    assert_none_named(&outcome);
    outcome
}

fn assert_none_named(outcome: &Outcome) {
    let is_named = outcome.errors.contains("not under the limit");
    assert!(!is_named, "{}", outcome.errors);
    assert!(outcome.number("processes_unmanaged") == 0.0);
}

fn assert_was_out(outcome: &Outcome) {
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
    assert_none_named(outcome);
}

#[test]
fn small_programs_have_no_helper_and_are_not_named() {
    beside!(&["cc", "sh"]);
    let script = "for i in $(seq 50); do sh -c true; /bin/true; done; sleep 2.5 & sleep 2; wait";
    // However long a look takes on a busy host, there is room for programs to wait for it.
    let outcome = program_below_a_shell(script, &[], &[]).run(Limits::Resident(4096 * MIB));
    outcome.assert_success();
    assert_none_named(&outcome);
    // Its first few may begin before there is known to be room.
    let helped = outcome.number("processes");
    assert!((1.0..12.0).contains(&helped), "{helped} of 153");
}

#[test]
fn children_of_a_program_with_a_helper_have_none_either() {
    beside!(&["cc", "sh"]);
    let script = "sleep 0.1; for i in $(seq 100); do (exit 0); done; (sleep 0.2; true)";
    for options in [&[][..], &["--prepare-forks"]] {
        let shell = program_below_a_shell(script, &[], options);
        let outcome = shell.run(Limits::Resident(4096 * MIB));
        outcome.assert_success();
        assert_none_named(&outcome);
        let helped = outcome.number("processes");
        assert!((1.0..12.0).contains(&helped), "{helped} of 103");
    }
}

/// Both ways in which forks are followed, in the long form; else the first of these.
fn ways<'a>(ways: [&'a [&'a str]; 2]) -> impl Iterator<Item = &'a [&'a str]> {
    let count = if rounds() > 1 { 2 } else { 1 };
    ways.into_iter().take(count)
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn forks_of_a_program_with_a_helper_keep_every_page() {
    beside!(&["cc"]);
    for options in ways([&[], &["--prepare-forks"]]) {
        let outcome = Program::new(compiled("late", &["late.c"], &["-pthread"]))
            .args(["forks", "560"])
            .memfold_options(options)
            .timeout(Duration::from_secs(120))
            .run(LIMIT);
        outcome.assert_success();
        assert_eq!(outcome.text(), "forks ok\n");
        assert_was_out(&outcome);
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_late_program_keeps_every_page() {
    beside!(&["cc", "sh"]);
    for options in [&[][..], &["--prepare-forks"]] {
        assert_was_out(&late(&["grow", "620"], options));
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn late_forks_keep_every_page() {
    beside!(&["cc", "sh"]);
    for options in ways([&["--prepare-forks"], &[]]) {
        assert_was_out(&late(&["forks", "560"], options));
    }
}

#[test]
fn a_child_in_its_parents_memory_gets_no_helper() {
    beside!(&["cc", "sh"]);
    assert_was_out(&late(&["spawns", "620"], &[]));
}

#[test]
fn a_program_that_changed_its_user_is_late_all_the_same() {
    beside!(&["cc", "sh"]);
    assert_was_out(&late(&["user", "620"], &[]));
}

/// With so much that it does not start its helper itself, however long a look takes.
fn with_much_room(arguments: &[&str]) -> Outcome {
    let script = "sleep 0.1; \"$0\" \"$@\"; exit $?";
    let outcome = program_below_a_shell(script, arguments, &[]).run(Limits::Resident(4096 * MIB));
    outcome.assert_success();
    assert_none_named(&outcome);
    outcome
}

#[test]
fn a_program_is_late_although_its_main_thread_has_ended() {
    beside!(&["cc", "sh"]);
    let outcome = with_much_room(&["outlives", "64"]);
    assert_eq!(outcome.text(), "outlives ok\n");
    assert!(outcome.number("processes") >= 2.0, "it got no helper");
}

#[test]
fn a_program_that_is_interrupted_as_it_has_itself_traced_is_managed() {
    beside!(&["cc", "sh"]);
    let outcome = with_much_room(&["ticks", "64"]);
    assert_eq!(outcome.text(), "helped ok\nticks ok\n");
    assert!(outcome.number("processes") >= 2.0, "it got no helper");
}

/// The helper is started while the program waits.
fn is_started_while(mode: &str) {
    let outcome = late(&[mode], &[]);
    assert!(outcome.number("processes") >= 2.0, "it got no helper");
}

#[test]
fn waits_are_not_cut_short_as_a_helper_is_started() {
    beside!(&["cc", "sh"]);
    for mode in ["waits", "signals"] {
        is_started_while(mode);
    }
}

#[test]
fn a_socket_with_a_timeout_is_waited_for_as_a_helper_is_started() {
    beside!(&["cc", "sh"]);
    is_started_while("receives");
}

#[test]
fn a_completion_is_waited_for_as_a_helper_is_started() {
    beside!(&["cc", "sh"]);
    is_started_while("ring");
}

#[test]
fn a_signal_ends_a_wait_as_a_helper_is_started() {
    beside!(&["cc", "sh"]);
    is_started_while("stopped");
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_late_program_under_a_tracer_starts_its_helper_itself() {
    beside!(&["cc", "sh", "strace"]);
    // Before and after programs do without a helper as yet.
    for pause in ["", "sleep 0.1; "] {
        let script = format!("{pause}strace -f -o /dev/null \"$0\" \"$@\"; exit $?");
        let outcome = below_a_shell(&script, &["grow", "620"], &[]);
        outcome.assert_success();
        assert_was_out(&outcome);
    }
}

/// As one on a file server that does not answer.
#[test]
fn a_program_that_executes_a_file_for_long_keeps_no_other_from_its_helper() {
    beside!(&["cc", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let [script, interpreter] = ["script", "interpreter"].map(|name| folder.path().join(name));
    fs::copy("/bin/true", &interpreter).expect("a copy");
    fs::write(&script, format!("#!{}\n", interpreter.display())).expect("a script");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("to be executed");
    let both =
        "sleep 0.1; \"$0\" executes 80 \"$@\" & \"$0\" helped 64; code=$?; kill -9 $!; exit $code";
    let arguments = [script, interpreter].map(|path| path.display().to_string());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // The shell and the other program have one.
    let outcome = program_below_a_shell(both, &arguments, &[]).run(Limits::Resident(4096 * MIB));
    outcome.assert_success();
    assert!(outcome.text().contains("helped ok\n"));
    assert!(outcome.number("processes") >= 2.0, "it got no helper");
}

/// As those of Windows programs under Wine.
#[test]
fn a_thread_whose_calls_the_program_handles_is_left_alone() {
    beside!(&["cc", "sh"]);
    for mode in ["blocks", "allows"] {
        let outcome = Program::new("sh")
            .args(["-c", "sleep 0.1; \"$0\" \"$@\"; exit $?"])
            .arg(compiled("dispatched", &["dispatched.c"], &[]))
            .arg(mode)
            .run(LIMIT);
        outcome.assert_success();
        assert_eq!(outcome.text(), format!("{mode} ok\n"));
        if mode == "allows" {
            assert_none_named(&outcome);
            assert!(outcome.number("processes") >= 2.0, "it got no helper");
        }
    }
}

/// It would end. What it forks gets a helper by its new name, where there is room and where there is little.
fn a_zygote_stays_alone(limit: Limits) -> Outcome {
    let outcome = Program::new("sh")
        .args(["-c", "\"$0\" --type=zygote 40; exit $?"])
        .arg(compiled("zygote", &["zygote.c"], &[]))
        .timeout(Duration::from_secs(120))
        .run(limit);
    outcome.assert_success();
    assert_eq!(outcome.text(), "the child has a helper\n");
    let named = "not under the limit: it is a browser's zygote";
    assert!(outcome.errors.contains(named), "{}", outcome.errors);
    assert_eq!(outcome.number("processes_unmanaged"), 1.0);
    outcome
}

#[test]
fn a_zygote_has_one_thread_where_there_is_room() {
    beside!(&["cc", "sh"]);
    a_zygote_stays_alone(LIMIT);
}

#[test]
fn a_zygote_has_one_thread_where_there_is_little_room() {
    beside!(&["cc", "sh"]);
    let outcome = a_zygote_stays_alone(Limits::Resident(24 * MIB));
    assert!(outcome.number("pages_in") > 1000.0);
}
