//! Programs that verify every page they own while their mappings change.

use crate::support::{
    Limits, MIB, Outcome, Program, compiled, rounds, short_or_long, torture, torture_seconds,
};
use std::time::Duration;

/// Runs the torture program, which takes `in_two_rounds` seconds in two rounds.
fn torment(in_two_rounds: u32, options: &[&str], resident: u64) -> Outcome {
    torment_by(Program::new(torture()), in_two_rounds, options, resident)
}

fn torment_by(program: Program, in_two_rounds: u32, options: &[&str], resident: u64) -> Outcome {
    let seconds = torture_seconds(in_two_rounds);
    let program = program
        .args(["--seconds", &seconds.to_string()])
        .args(options)
        .timeout(Duration::from_secs((120 + seconds).into()));
    let outcome = program.run(Limits::Resident(resident));
    outcome.assert_success();
    outcome.assert_limit_held();
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out: {}",
        outcome.text()
    );
    outcome
}

/// One test a disturbance, so that a failure names its cause.
macro_rules! verified_while {
    ($($test:ident: $names:literal;)*) => {$(
        #[test]
        fn $test() {
            alone!(&["cc"]);
            torment(2, &["--megabytes", "64", "--disturb", $names], 18 * MIB);
        }
    )*};
}

verified_while! {
    pages_survive_reclaim_alone: "none";
    pages_survive_mremap: "grow,shrink,move,part,dontunmap";
    pages_survive_madvise: "dontneed,free,advice";
    pages_survive_mprotect: "readonly,noaccess";
    pages_survive_munmap_and_map_fixed: "unmap,fixed";
    pages_survive_system_calls_and_locking: "syscalls,lock";
    pages_survive_mappings_made_and_dropped_beside_them: "churn,sparse,brk";
    pages_survive_forks: "fork,wipe";
    pages_survive_spawned_programs: "spawn";
    pages_survive_signals_and_short_threads: "signals,threads";
}

/// As where the kernel has no `UFFDIO_MOVE`.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn pages_survive_being_carried_off() {
    alone!(&["cc"]);
    for names in [
        "none",
        "grow,shrink,move,part,dontunmap,unmap,fixed",
        "dontneed,free,advice,readonly,syscalls,lock",
        "fork,wipe,spawn,threads,churn,sparse,brk",
    ] {
        let program = Program::new(torture()).env("MEMFOLD_WITHOUT_MOVE", "1");
        let options = ["--megabytes", "64", "--disturb", names];
        torment_by(program, 2, &options, 18 * MIB);
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn pages_survive_everything_at_once() {
    alone!(&["cc"]);
    for (seed, threads, megabytes) in [("1", "2", "64"), ("2", "6", "96"), ("3", "1", "48")] {
        torment(
            3,
            &[
                "--megabytes",
                megabytes,
                "--threads",
                threads,
                "--seed",
                seed,
            ],
            24 * MIB,
        );
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_tree_of_forks_keeps_every_copy() {
    alone!(&["cc"]);
    let program = Program::new(compiled("forktree", &["forktree.c"], &[])).arg("60");
    // How many of its processes are alive at once is chance, so the limits are not a
    // part of a native run's peak.
    let limits = [Limits::Resident(24 * MIB), Limits::Total(110 * MIB)];
    for limits in limits.into_iter().take(short_or_long(1, 2)) {
        let outcome = program.run(limits);
        outcome.assert_success();
        assert_eq!(outcome.text(), "forktree ok: 3 levels, 2 orphans\n");
        if limits == Limits::Resident(24 * MIB) {
            outcome.assert_limit_held();
            outcome.assert_swapped(60 * MIB);
        } else {
            outcome.assert_limit_held_but_for_copies();
        }
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn writes_after_a_fork_wait_for_room() {
    alone!(&["cc"]);
    let program =
        Program::new(compiled("copies", &["copies.c"], &[])).args(["60", short_or_long("3", "6")]);
    // One side alone fits; both together do not.
    for limits in [Limits::Resident(68 * MIB), Limits::Resident(30 * MIB)] {
        let outcome = program.run(limits);
        outcome.assert_success();
        assert_eq!(outcome.text(), "copies ok\n");
        outcome.assert_limit_held();
        outcome.assert_swapped(100 * MIB);
    }
}

/// What a fork shares is copied to be moved out, and a page that is not to be written cannot be.
#[test]
fn read_only_pages_keep_no_others_in_memory_after_a_fork() {
    alone!(&["cc"]);
    let program = Program::new(compiled("barrier", &["barrier.c"], &[])).args(["32", "6"]);
    let outcome = program.run(Limits::Resident(20 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "barrier ok\n");
    outcome.assert_limit_held();
}

#[test]
fn memtester_finds_nothing() {
    only_in_the_long_form!();
    alone!(&["memtester", "setpriv"]);
    // Without the capability and the limit it cannot lock its buffer, and tests it unlocked.
    let script =
        "ulimit -l 0; exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock memtester 34M 1";
    // But for .ci/long, only the tests that go through the buffer once.
    let tests = if rounds() > 2 { "0x1ffff" } else { "0x180ff" };
    let program = Program::new("sh")
        .args(["-c", script])
        .env("MEMTESTER_TEST_MASK", tests)
        .timeout(Duration::from_secs(300));
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    let text = outcome.text();
    assert!(
        text.contains("unlocked"),
        "its memory must not be locked: {text}"
    );
    assert!(text.contains("Done."), "{text}");
    outcome.assert_swapped(34 * MIB);
    outcome.assert_limit_held();
}

#[test]
fn stressapptest_finds_nothing() {
    only_in_the_long_form!();
    alone!(&["stressapptest"]);
    let program =
        Program::new("stressapptest").args(["-s", short_or_long("4", "8"), "-M", "96", "-m", "2"]);
    let outcome = program.run(Limits::Resident(32 * MIB));
    outcome.assert_success();
    assert!(
        outcome.text().contains("Status: PASS"),
        "{}",
        outcome.text()
    );
    outcome.assert_swapped(96 * MIB);
    outcome.assert_limit_held();
}
