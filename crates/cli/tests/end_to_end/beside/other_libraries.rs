//! Programs of another C library: musl's, and busybox.

use super::attach::{Verify, assert_cycles, command, text};
use crate::support::{Limits, MIB, Program, compiled_by, rounds, short_or_long};
use std::path::PathBuf;

/// `verify` with musl, whose loader and whose threads are its own.
fn musl_verify() -> PathBuf {
    compiled_by("musl-gcc", "verify-musl", &["verify.c"], &[])
}

fn static_musl_verify() -> PathBuf {
    compiled_by(
        "musl-gcc",
        "verify-musl-static",
        &["verify.c"],
        &["-static"],
    )
}

/// Paged out under a limit, right in every round, and inside the limit.
fn assert_held(program: &Program, limit: Limits, bytes: u64, output: &str) {
    let outcome = program.run(limit);
    outcome.assert_success();
    outcome.assert_swapped(bytes);
    let unmanaged = outcome.number("processes_unmanaged");
    assert_eq!(unmanaged, 0.0, "{}", outcome.errors);
    assert_eq!(outcome.text(), output);
}

#[test]
fn a_program_of_musl_is_held() {
    beside!(&["musl-gcc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    for program in [musl_verify(), static_musl_verify()] {
        let program = Program::new(program).args(["64", "6"]);
        let program = program.arg(folder.path().join("results"));
        assert_held(&program, Limits::Resident(16 * MIB), 64 * MIB, "......");
    }
}

#[test]
fn a_program_of_musl_is_attached_and_detached_again_and_again() {
    beside!(&["musl-gcc"]);
    for program in [musl_verify(), static_musl_verify()] {
        Verify::of(&program).assert_attached_and_detached(short_or_long(3, 100));
    }
}

/// Fills a table of some 40 MB with small strings, and compares all of them in each round.
const TABLE: &str = r#"BEGIN {
    for (i = 0; i < 400000; i++)
        table[i] = "text " i
    for (round = 0; round < rounds; round++) {
        for (i = 0; i < 400000; i++)
            if (table[i] != "text " i) {
                print i " is " table[i]
                exit 1
            }
        print "round " round
    }
}"#;

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_table_of_busybox_is_held() {
    beside!(&["busybox"]);
    let program = Program::new("busybox").args(["awk", "-v", "rounds=2", TABLE]);
    let rounds = "round 0\nround 1\n";
    assert_held(&program, Limits::Resident(16 * MIB), 36 * MIB, rounds);
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_table_of_busybox_is_attached_and_detached_again_and_again() {
    beside!(&["busybox"]);
    let rounds = format!("rounds={}", short_or_long(4, 40));
    let words = ["busybox", "awk", "-v", &rounds, TABLE];
    let native = command(&words).output().expect("it runs");
    assert_cycles((1, short_or_long(2, 100)), &words, "16M", |output| {
        output == text(&native.stdout)
    });
}

/// All but `brk`, which musl's `sbrk` does not move.
const DISTURBANCES: &str = "grow,shrink,move,part,dontunmap,dontneed,free,readonly,noaccess,unmap,fixed,syscalls,\
                            lock,advice,wipe,churn,sparse,fork,spawn,signals,threads";

/// Threads move, drop, map over and fork memory.
#[test]
fn torture_of_musl_survives_attaching_and_detaching() {
    only_in_the_long_form!();
    beside!(&["musl-gcc"]);
    let sources = ["torture.c", "torture_owner.c", "torture_threads.c"];
    for (name, options) in [
        ("torture-musl", &[][..]),
        ("torture-musl-static", &["-static"][..]),
    ] {
        let program = compiled_by("musl-gcc", name, &sources, options);
        let program = program.display().to_string();
        let seconds = (5 * rounds()).to_string();
        let words = [
            &*program,
            "--seconds",
            &seconds,
            "--megabytes",
            "48",
            "--disturb",
            DISTURBANCES,
        ];
        assert_cycles((1, 2 * rounds()), &words, "18M", |_| true);
    }
}
