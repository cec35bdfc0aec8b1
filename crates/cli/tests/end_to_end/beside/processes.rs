//! One limit over a tree of processes.

use crate::support::{Limits, MIB, Program, compiled, python, source};
use std::process::Command;
use std::time::Duration;

#[test]
fn a_program_that_outlives_its_parent_is_still_served() {
    beside!(&["cc", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    // The first program ends at once; its child goes on in the background, and its
    // output says that it came to its end.
    let script = "(\"$0\" 64 12 \"$1\"; echo \"ended $?\") & exit 3";
    let outcome = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(&result)
        .run(Limits::Resident(16 * MIB));
    assert_eq!(outcome.code(), 3);
    assert_eq!(outcome.text(), "............ended 0\n");
    assert_eq!(
        std::fs::read_to_string(&result).expect("the result file"),
        ""
    );
}

/// How many descriptors a process has, but for those it opens for a moment.
fn descriptors(process: i32) -> usize {
    let count = || {
        std::thread::sleep(Duration::from_millis(10));
        let folder = std::fs::read_dir(format!("/proc/{process}/fd"));
        folder.expect("its descriptors").count()
    };
    (0..30).map(|_| count()).min().unwrap_or(0)
}

/// Sets how many descriptors a process may have.
fn limit_descriptors(process: i32, most: usize) {
    let set = Command::new("prlimit")
        .args([format!("--pid={process}"), format!("--nofile={most}:")])
        .status()
        .expect("prlimit runs");
    assert!(set.success(), "prlimit: {set}");
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn forks_wait_while_memfold_has_no_descriptors_for_them() {
    beside!(&["prlimit"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    // None at all, or too few for all that a child needs.
    for more in [0, 4, 8] {
        let goes_on = folder.path().join(more.to_string());
        let mut running = Program::new(python())
            .arg(source("forks.py"))
            .arg(&goes_on)
            .start(Limits::Resident(16 * MIB));
        running.wait_for_output(5);
        limit_descriptors(running.root(), descriptors(running.root()) + more);
        std::fs::write(&goes_on, "").expect("the file");
        std::thread::sleep(Duration::from_millis(500));
        let now = running.output_so_far().len();
        assert_eq!(now, 5, "{more} more: no child was let run");
        limit_descriptors(running.root(), 1024);
        let outcome = running.wait();
        outcome.assert_success();
        assert_eq!(outcome.text(), ".".repeat(60));
    }
}

/// Threads help the reclaimer, which takes from several programs at a time.
#[test]
fn programs_that_grow_at_once_keep_their_pages() {
    beside!(&["cc"]);
    let outcome = Program::new(compiled("together", &["together.c"], &[]))
        .args(["12", "12", "3"])
        .run(Limits::Resident(48 * MIB));
    outcome.assert_success();
    let text = outcome.text();
    let helped = text.strip_prefix("0 failed, ").expect("no program failed");
    let cpus = memfold_sys::thread::allowed_cpus().len();
    assert_eq!(helped.starts_with("0 "), cpus == 1, "{text}");
}
