//! Programs that verify every page they own while their mappings change.

use crate::support::{Limits, MIB, Outcome, Program, alone, available, compiled, skip, torture};
use std::time::Duration;

fn torment(options: &[&str], resident: u64) -> Outcome {
    let program = Program::new(torture())
        .args(options)
        .timeout(Duration::from_secs(120));
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
            if !available(stringify!($test), &["cc"]) {
                return;
            }
            let _guard = alone();
            torment(&["--seconds", "3", "--megabytes", "64", "--disturb", $names], 18 * MIB);
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

#[test]
fn pages_survive_everything_at_once() {
    if !available("torture", &["cc"]) {
        return;
    }
    let _guard = alone();
    for (seed, threads, megabytes) in [("1", "2", "64"), ("2", "6", "96"), ("3", "1", "48")] {
        torment(
            &[
                "--seconds",
                "6",
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
fn a_tree_of_forks_keeps_every_copy() {
    if !available("forktree", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("forktree", &["forktree.c"], &[])).arg("60");
    // How many of its processes are alive at once is chance, so the limits are not a
    // part of a native run's peak.
    for limits in [Limits::Resident(24 * MIB), Limits::Total(110 * MIB)] {
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
fn writes_after_a_fork_wait_for_room() {
    if !available("copies", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("copies", &["copies.c"], &[])).arg("60");
    // One side alone fits; both together do not.
    for limits in [Limits::Resident(68 * MIB), Limits::Resident(30 * MIB)] {
        let outcome = program.run(limits);
        outcome.assert_success();
        assert_eq!(outcome.text(), "copies ok\n");
        outcome.assert_limit_held();
        outcome.assert_swapped(100 * MIB);
    }
}

#[test]
fn what_fills_a_gap_while_it_is_taken_over_is_not_lost() {
    if !available("gaps", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("gaps", &["gaps.c"], &["-pthread"])).args(["8", "8", "24"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "gaps ok\n");
    outcome.assert_swapped(32 * MIB);
}

#[test]
fn a_child_uses_what_was_kept_from_it() {
    if !available("dontfork", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("dontfork", &["dontfork.c"], &[])).args(["24", "40"]);
    // Managed, but with nothing out as it forks, and with much out.
    for limit in [32 * MIB, 16 * MIB] {
        let outcome = program.clone().run(Limits::Resident(limit));
        outcome.assert_success();
        assert_eq!(outcome.text(), "dontfork ok\n");
        outcome.assert_swapped(80 * MIB);
    }
}

#[test]
fn a_child_is_not_taken_for_another_of_its_number() {
    if !available("namespaces", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = compiled("namespaces", &["namespaces.c"], &[]);
    for other in ["managed", "unmanaged"] {
        let program = Program::new(&program).args([other, "48"]);
        let outcome = program.run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "namespaces ok\n");
        outcome.assert_swapped(24 * MIB);
    }
}

#[test]
fn what_was_dropped_is_zero_and_known_to_be_gone() {
    if !available("dropped", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("dropped", &["dropped.c"], &[])).args(["48", "13"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "dropped ok\n");
    outcome.assert_limit_held();
}

/// What a fork shares is copied to be moved out, and a page that is not to be written cannot be.
#[test]
fn read_only_pages_keep_no_others_in_memory_after_a_fork() {
    if !available("barrier", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("barrier", &["barrier.c"], &[])).args(["32", "6"]);
    let outcome = program.run(Limits::Resident(20 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "barrier ok\n");
    outcome.assert_limit_held();
}

/// Known as resident, such a page would be reported as lost once it is dropped.
#[test]
fn zeros_are_not_brought_in_where_memory_is_given_up() {
    if !available("ahead", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("ahead", &["ahead.c"], &["-pthread"])).arg("4");
    let outcome = program.run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "ahead ok\n");
    outcome.assert_swapped(48 * MIB);
}

#[test]
fn what_was_dropped_comes_back_many_pages_at_a_time() {
    if !available("refill", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("refill", &["refill.c"], &[])).args(["6", "50"]);
    let outcome = program.run(Limits::Resident(24 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "refill ok\n");
    outcome.assert_swapped(32 * MIB);
    let refilled = 50.0 * 6.0 * 256.0;
    let faults = outcome.number("faults_zero_fill");
    assert!(
        faults < refilled / 8.0,
        "{faults} faults for {refilled} pages"
    );
}

/// Pages go away without an event here, as a lost page would: this must not pass in silence.
#[test]
fn a_page_that_is_not_where_it_was_is_reported() {
    if !available("guarded", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("guarded", &["guarded.c"], &[])).arg("40");
    let outcome = program.run(Limits::Resident(16 * MIB));
    if outcome.text() == "no guard regions\n" {
        skip("guarded", "guard regions (Linux 6.13)");
        return;
    }
    assert_eq!(outcome.text(), "zeros\n", "{}", outcome.errors);
    assert!(outcome.has_missed_a_page(), "{}", outcome.errors);
}

#[test]
fn a_program_that_secures_itself_keeps_its_memory() {
    if !available("hostile", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("hostile", &["hostile.c"], &[])).arg("64");
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    // No limit to hold: the child under a filter has no helper, and what it touches stays in.
    outcome.assert_swapped(64 * MIB);
}

#[test]
fn memtester_finds_nothing() {
    if !available("memtester", &["memtester", "setpriv"]) {
        return;
    }
    let _guard = alone();
    // Without the capability and the limit it cannot lock its buffer, and tests it unlocked.
    let script =
        "ulimit -l 0; exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock memtester 34M 1";
    let program = Program::new("sh")
        .args(["-c", script])
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
    if !available("stressapptest", &["stressapptest"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new("stressapptest").args(["-s", "8", "-M", "96", "-m", "2"]);
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

#[test]
fn the_last_pages_that_a_program_can_have_are_kept() {
    if !available("last_pages", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = compiled("last_pages", &["last_pages.c"], &[]);
    let outcome = Program::new(program)
        .args(["3", "24"])
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    if outcome.text() == "taken\n" {
        skip("last_pages", "free memory at the end of the address space");
        return;
    }
    assert_eq!(outcome.text(), "last_pages ok\n");
}

/// A program that writes over its channel harms itself, if anybody.
#[test]
fn a_program_that_scribbles_over_its_channel_harms_no_other() {
    if !available("scribble", &["cc", "sh"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("result");
    let script = "for seed in 1 2 3; do \"$0\" 4 24 $seed >/dev/null & done
                  \"$1\" 40 4 \"$2\"; status=$?; sleep 4; kill -9 $(jobs -p) 2>/dev/null; exit $status";
    let program = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("scribble", &["scribble.c"], &[]))
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(&file)
        .timeout(Duration::from_secs(60));
    let outcome = program.run(Limits::Resident(32 * MIB));
    assert!(
        outcome.status.success(),
        "{}\n{}",
        outcome.text(),
        outcome.errors
    );
    let result = std::fs::read_to_string(&file).expect("the result file");
    assert_eq!(result, "", "{}", outcome.text());
    assert!(outcome.number("pages_in") > 1000.0);
}
