//! Forks that the programs' library prepares, as the kernel reports none: without any capability, and beside root's.

use crate::support::{
    LEAST_RESIDENT, Limits, MIB, Program, STRANGER, Stage, compiled, compiled_by, memfold, python,
    short_or_long,
};
use std::time::Duration;

const PREPARED: [&str; 1] = ["--prepare-forks"];

fn prepared(program: &str, arguments: &[&str]) -> Program {
    let source = format!("{program}.c");
    Program::new(compiled(program, &[&source], &[]))
        .args(arguments)
        .memfold_options(PREPARED)
        .timeout(Duration::from_secs(120))
}

/// What memfold run prints and exits with for a user whose only right is to open /dev/userfaultfd.
fn without_rights(stage: &Stage, command: &str) -> (String, String) {
    let output = stage.run(&format!(
        "setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups --no-new-privs --bounding-set -all \\
         {command}"
    ));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {out}{errors}", output.status);
    (out, errors)
}

#[test]
fn a_user_without_rights_needs_only_the_device() {
    beside!(&["cc", "setpriv", "unshare"]);
    let stage = Stage::new();
    let (out, _) = without_rights(&stage, "./memfold doctor");
    assert!(out.contains("prepared by the programs' library"), "{out}");
    let forktree = compiled("forktree", &["forktree.c"], &[]);
    stage.program(&forktree, "forktree");
    let run = "./memfold run --resident 16M --stats - --";
    let (out, errors) = without_rights(&stage, &format!("{run} ./forktree 24"));
    assert!(
        out.starts_with("forktree ok: 3 levels, 2 orphans\n"),
        "{out}{errors}"
    );
    let statistics = out.split_once('{').map(|(_, rest)| format!("{{{rest}"));
    let statistics: serde_json::Value =
        serde_json::from_str(&statistics.expect("JSON")).expect("statistics");
    let number = |name: &str| statistics[name].as_u64().expect("a number");
    assert!(number("pages_in") > 1000, "hardly anything was out: {out}");
    assert_eq!(number("processes_unmanaged"), 0, "{out}");
}

/// The program's helper lacks descriptors; its child's does not, and has its beacon.
#[test]
fn the_child_of_a_program_without_a_helper_forks() {
    beside!(&["cc"]);
    let outcome = prepared("refusedfork", &["24"]).run(Limits::Resident(LEAST_RESIDENT));
    outcome.assert_success();
    assert_eq!(outcome.text(), "refusedfork ok\n");
    let pages_in = outcome.number("pages_in");
    assert!(pages_in > 1000.0, "hardly anything was out: {pages_in}");
}

#[test]
fn children_of_the_c_library_have_everything() {
    beside!(&["cc"]);
    // popen, system and posix_spawn share their memory with the child until it executes.
    let script = "
import os, subprocess, threading
data = bytearray(48 << 20)
for page in range(0, len(data), 4096):
    data[page:page + 8] = page.to_bytes(8, 'little')
def check():
    for page in range(0, len(data), 4096):
        assert data[page:page + 8] == page.to_bytes(8, 'little'), page
def fork():
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            check()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
threads = [threading.Thread(target=fork) for _ in range(4)]
[thread.start() for thread in threads]
for _ in range(5):
    assert os.system('true') == 0
    assert os.popen('echo here').read() == 'here\\n'
    assert subprocess.run(['true']).returncode == 0
    assert subprocess.run(['true'], preexec_fn=check).returncode == 0
    assert os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)[1] == 0
[thread.join() for thread in threads]
check()
print('all there')
";
    let outcome = Program::new(python())
        .args(["-c", script])
        .memfold_options(PREPARED)
        .timeout(Duration::from_secs(120))
        .run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "all there\n");
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
}

#[test]
fn children_forked_beside_moves_see_one_moment() {
    beside!(&["cc"]);
    let modes = ["race", "stays", "over", "left", "drops"];
    for mode in modes.into_iter().take(short_or_long(1, modes.len())) {
        let outcome = prepared("departures", &[mode, "24", "1"]).run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), format!("{mode} ok\n"));
    }
}

/// A program whose threads move memory without a pause after each of its forks keeps its own children waiting alone.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_programs_forks_delay_no_others() {
    beside!(&["cc", "sh"]);
    // The other one may be refused further forks by then, and end.
    let script = "\"$0\" stall 24 & sleep 2; \"$0\" fork 12 30; status=$?; kill $!; exit $status";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("forkstall", &["forkstall.c"], &[]))
        .memfold_options(PREPARED)
        .timeout(Duration::from_secs(100))
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    let longest: u64 = outcome.text().trim().parse().expect("all forks succeed");
    assert!(longest < 2000, "{longest} ms: {}", outcome.errors);
}

/// Under a filter that memfold has, too, a fork asks the supervisor first, which takes longer.
#[test]
fn a_signals_handler_may_fork_at_any_moment_of_a_fork() {
    beside!(&["cc"]);
    let path = compiled("alarmfork", &["alarmfork.c"], &[]);
    let run = ["run", "--resident", "16M", "--prepare-forks", "--"];
    let under_filter = Program::new(&path)
        .args(["under".as_ref(), memfold().as_os_str()])
        .args(run)
        .arg(&path)
        .args(["24", "100"])
        .timeout(Duration::from_secs(60))
        .run(Limits::None);
    let without = prepared("alarmfork", &["24", "100"]).run(Limits::Resident(16 * MIB));
    for outcome in [under_filter, without] {
        outcome.assert_success();
        assert_eq!(outcome.text(), "alarmfork ok\n", "{}", outcome.errors);
    }
}

/// No loader brings the library to them: their C library's code is changed where it forks.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn children_of_static_programs_have_everything() {
    beside!(&["cc", "musl-gcc"]);
    for compiler in ["cc", "musl-gcc"] {
        let run = |program: &str, arguments: &[&str], printed: &str| {
            let source = format!("{program}.c");
            let name = format!("{program}-static-{compiler}");
            let path = compiled_by(compiler, &name, &[&source], &["-static", "-pthread"]);
            let outcome = Program::new(path)
                .args(arguments)
                .memfold_options(PREPARED)
                .timeout(Duration::from_secs(120))
                .run(Limits::Resident(16 * MIB));
            outcome.assert_success();
            assert_eq!(outcome.text(), printed, "{compiler}");
            outcome.assert_swapped(16 * MIB);
            let unmanaged = outcome.number("processes_unmanaged");
            assert_eq!(unmanaged, 0.0, "{compiler}: {}", outcome.errors);
        };
        let tree = "forktree ok: 3 levels, 2 orphans\n";
        run("forktree", &["24"], tree);
        // Its handlers take more than one of musl's threads has of a stack.
        if compiler == "cc" {
            run("departures", &["race", "24", "1"], "race ok\n");
        }
    }
}

/// The forking thread withholds again what it gave, where other memory may be mapped by then.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn children_have_what_was_mapped_beside_a_fork() {
    beside!(&["cc"]);
    for what in ["anonymous", "file"] {
        let outcome = prepared("mapped_over", &["24", what]).run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "mapped_over ok\n");
    }
}

#[test]
fn a_child_past_the_c_library_lacks_what_is_managed() {
    beside!(&["cc"]);
    let outcome = prepared("rawclone", &["32"]).run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    let lacking = outcome
        .text()
        .split_once(' ')
        .map(|(number, _)| number.to_owned());
    let lacking: u32 = lacking
        .and_then(|number| number.parse().ok())
        .expect("a number");
    assert!(lacking > 0, "{}", outcome.text());
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_program_with_filters_of_its_own_gets_all_back() {
    beside!(&["cc"]);
    let outcome = prepared("hostile", &["64"]).run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    outcome.assert_swapped(64 * MIB);
}

#[test]
fn what_a_program_keeps_from_its_children_stays_kept() {
    beside!(&["cc"]);
    prepared("dontfork", &["24", "40"])
        .run(Limits::Resident(32 * MIB))
        .assert_success();
}

#[test]
fn what_a_program_keeps_from_its_children_is_paged_out() {
    beside!(&["cc"]);
    // Most of it, as of a JavaScript engine's heap.
    for limit in [LEAST_RESIDENT, 32 * MIB] {
        let outcome = prepared("dontfork", &["48", "8", "40"]).run(Limits::Resident(limit));
        outcome.assert_success();
        assert_eq!(outcome.text(), "dontfork ok\n");
        outcome.assert_swapped(48 * MIB);
    }
}

#[test]
fn a_guessed_token_inherits_nothing() {
    beside!(&["cc"]);
    for (arguments, answer) in [
        (&["token", "32"][..], "not welcomed\n"),
        (&["sound"], "welcomed\n"),
    ] {
        let outcome = prepared("uninvited", arguments).run(Limits::Resident(LEAST_RESIDENT));
        outcome.assert_success();
        assert_eq!(outcome.text(), answer, "{}", outcome.errors);
    }
}

/// What forks share and may be written to without a fault is a 128th of the limit at most, in all of a family, whether the kernel
/// reports forks or the library prepares them.
#[test]
fn few_copies_are_made_without_being_admitted() {
    beside!(&["cc"]);
    const LIMIT: u64 = 64 * MIB;
    const FAMILY: u64 = 3;
    let most = LIMIT / 4096 / 128 / FAMILY;
    let found = |written: u64, options: &[&str]| -> u64 {
        let program = Program::new(compiled("hotpages", &["hotpages.c"], &[]))
            .args(["50", &written.to_string(), "6"])
            .memfold_options(options);
        let outcome = program.run(Limits::Resident(LIMIT));
        outcome.assert_success();
        outcome.text().trim().parse().expect("a number")
    };
    for written in [10, 20] {
        let stayed = found(written, &[]);
        assert!(
            (written..=most).contains(&stayed),
            "what is written all the time stays writable: {stayed} pages of {written}"
        );
    }
    for (written, options) in [(200, &[][..]), (20, &PREPARED), (200, &PREPARED)] {
        let stayed = found(written, options);
        assert!(stayed <= most, "{stayed} pages, {options:?}");
    }
}
