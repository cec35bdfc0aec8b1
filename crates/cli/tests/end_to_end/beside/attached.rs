//! Programs that no loader brings the library into: they are attached while they run.

use super::attach::assert_refused;
use super::containers::{assert_paged_out, printed};
use crate::support::{Limits, MIB, Outcome, Program, Stage, compiled, memfold, skip, source};
use std::path::PathBuf;
use std::process::Command;

const LIMIT: Limits = Limits::Resident(16 * MIB);

/// `verify` without a loader.
fn static_verify() -> PathBuf {
    compiled("verify-static", &["verify.c"], &["-static"])
}

fn assert_held(outcome: &Outcome, bytes: u64) {
    outcome.assert_success();
    outcome.assert_swapped(bytes);
    let unmanaged = outcome.number("processes_unmanaged");
    assert_eq!(unmanaged, 0.0, "{}", outcome.errors);
}

#[test]
fn a_static_program_is_held() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let results = folder.path().join("results");
    let program = Program::new(static_verify()).args(["64", "6"]);
    let outcome = program.arg(&results).run(LIMIT);
    assert_held(&outcome, 32 * MIB);
    assert_eq!(outcome.text(), "......");
}

/// It has been running for some time when it is found.
#[test]
fn a_static_child_is_held() {
    beside!(&["cc", "sh"]);
    let program = Program::new(source("until-paged-out.sh"));
    assert_found_and_held(program.arg(static_verify()));
}

/// Of `verify`, which `until-paged-out.sh` runs and ends.
fn assert_found_and_held(program: Program) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let results = folder.path().join("results");
    let outcome = program.args(["64", "0"]).arg(&results).run(LIMIT);
    assert_eq!(outcome.code(), 143, "{}", outcome.errors);
    outcome.assert_swapped(32 * MIB);
    let unmanaged = outcome.number("processes_unmanaged");
    assert_eq!(unmanaged, 0.0, "{}", outcome.errors);
    let mismatches = std::fs::read_to_string(&results).expect("its results");
    assert_eq!(mismatches, "");
}

/// A tracer switches late starts off for the rest of the run, by a word in the library's file.
#[test]
fn a_static_program_is_held_after_a_program_was_traced() {
    beside!(&["cc", "sh", "strace"]);
    let script = "strace -o /dev/null true; \"$0\" \"$@\"; exit $?";
    let program = Program::new("sh").args(["-c", script]);
    let program = program.arg(source("until-paged-out.sh"));
    assert_found_and_held(program.arg(static_verify()));
}

#[test]
fn a_program_without_the_variable_is_held() {
    beside!(&["cc", "env", "sh"]);
    let program = Program::new("env").arg("-i");
    let program = program.arg(source("until-paged-out.sh"));
    assert_found_and_held(program.arg(compiled("verify", &["verify.c"], &[])));
}

/// Its threads are Go's own, and its stacks are too small for another's code.
#[test]
fn a_go_program_is_held() {
    beside!(&["go"]);
    for prepared in ["0", "1"] {
        let program = Program::new(go_heap()).args(["64", "3"]);
        let program = program.env("MEMFOLD_PREPARE_FORKS", prepared);
        let outcome = program.run(Limits::Resident(32 * MIB));
        assert_held(&outcome, 32 * MIB);
        assert_eq!(outcome.text(), "heap ok\n");
    }
}

/// The kernel reports no forks to its user, and code of Go's linker is known to fork in one way.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn without_a_capability_attach_takes_programs_of_gos_linker_alone() {
    beside!(&["cc", "go", "setpriv", "unshare"]);
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    if scope.is_ok_and(|scope| scope.trim() != "0") {
        skip("kernel.yama.ptrace_scope = 0");
        return;
    }
    let stage = Stage::new();
    stage.program(&go_heap(), "heap");
    stage.program(&compiled("verify", &["verify.c"], &[]), "verify");
    let as_stranger = |program: &str| {
        let attach = "./memfold attach $! -q --resident 24M --stats -; status=$?";
        stage.run_as_stranger(&format!(
            "sh -c '{program} & {attach}; kill $! 2> /dev/null; exit $status'"
        ))
    };
    let out = printed(&as_stranger("./heap 64 40"));
    assert!(out.contains("heap ok\n"), "{out}");
    assert_paged_out(&out);
    let refused = as_stranger("./verify 64 100000 /tmp/results");
    for part in ["would not see it fork", "CAP_SYS_PTRACE"] {
        assert_refused(&refused, part);
    }
}

/// A program of Go's linker, which needs no C library.
pub(super) fn go_heap() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join("heap-go");
    let status = Command::new("go")
        .args(["build", "-o"])
        .args([&program, &source("heap.go")])
        .envs([("CGO_ENABLED", "0"), ("GO111MODULE", "off")])
        .env("GOCACHE", folder.join("go-cache"))
        .status();
    assert!(status.expect("go runs").success(), "go could not compile");
    program
}

/// Where the kernel reports no forks, and its code forks in a way in which it cannot be led elsewhere.
#[test]
fn a_static_program_whose_forks_are_unseen_is_left_alone() {
    beside!(&["cc"]);
    let program = compiled("pushfork-static", &["pushfork.c"], &["-static"]);
    let program = Program::new(program).args(["64", "40"]);
    let outcome = program.memfold_options(["--prepare-forks"]).run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "pushfork ok\n");
    assert_eq!(outcome.number("pages_out"), 0.0);
    assert!(outcome.number("processes_unmanaged") > 0.0);
    assert!(
        outcome.errors.contains("would not see it fork"),
        "{}",
        outcome.errors
    );
}

/// A shell without a loader that forks for each command, a pipeline and a subshell.
#[test]
fn a_static_shell_runs_as_always() {
    beside!(&["busybox"]);
    const SCRIPT: &str = "text=x; i=0; while [ $i -lt 18 ]; do text=$text$text; i=$((i+1)); done; \
                          i=0; while [ $i -lt 300 ]; do (echo ${#text} | busybox cat) > /dev/null || exit 1; i=$((i+1)); \
                          done; echo ${#text}";
    for options in [&[][..], &["--prepare-forks"]] {
        let program = Program::new("busybox").args(["sh", "-c", SCRIPT]);
        let outcome = program.memfold_options(options).run(LIMIT);
        outcome.assert_success();
        assert_eq!(outcome.text(), "262144\n");
    }
}

/// The library's descriptors are none of the program's.
#[test]
fn an_attached_program_has_no_descriptor_more() {
    beside!(&["busybox"]);
    let with = |words: &[&str], wait: &str| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["busybox", "sh", "-c"]);
        let show = "grep Threads /proc/$$/status; ls /proc/$$/fd";
        command.arg(format!("{wait} {show}"));
        let output = command.output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let native = with(&["env"], "");
    let memfold = memfold().to_str().expect("a plain path");
    // For 20 s at most, until it has the library's thread, and that has closed what it began with.
    let attached = "for i in $(seq 200); do grep -q Threads:.2 /proc/$$/status && break; sleep 0.1; done; sleep 0.3;";
    let held = with(&[memfold, "run", "--limit", "64M", "--"], attached);
    assert_eq!(held, native.replace("Threads:\t1\n", "Threads:\t2\n"));
}

/// As `su-exec` does, and a static program that starts others; what they execute has the library by its loader.
#[test]
fn a_program_that_executes_another_as_it_is_attached_has_one_library() {
    beside!(&["cc", "sh"]);
    let script = "for i in $(seq 60); do \"$0\" executes $((i * 3000)) \"$1\" & all=\"$all $!\"; done; \
                  for i in $(seq 4); do \"$0\" spawns $((i * 20000)) /bin/true & all=\"$all $!\"; done; \
                  for one in $all; do wait $one || exit 1; done";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("before", &["becomes.c"], &["-static", "-DBEFORE"]))
        .arg(compiled("becomes", &["becomes.c"], &[]))
        .run(Limits::Resident(512 * MIB));
    outcome.assert_success();
    let text = outcome.text();
    let copies: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(copies.len(), 64, "{text}");
    assert!(copies.iter().all(|copies| *copies <= 1), "{copies:?}");
    assert_eq!(
        outcome.number("processes_unmanaged"),
        0.0,
        "{}",
        outcome.errors
    );
}
