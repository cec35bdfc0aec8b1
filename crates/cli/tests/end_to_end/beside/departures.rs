//! Programs that part from their memory in unusual ways: the parent of a fork ends at once, the
//! main thread ends before the others, threads end without a touch, a child has no helper, a helper is
//! stopped, a whole program is.

use super::crash::must_end;
use crate::support::{Limits, MIB, Outcome, Program, compiled, rounds, skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Duration;

fn departures(mode: &str, megabytes: &str) -> Program {
    Program::new(compiled("departures", &["departures.c"], &[]))
        .args([mode, megabytes, &rounds().to_string()])
        .timeout(Duration::from_secs(120 + 30 * u64::from(rounds())))
}

/// Runs it with a part of its memory out.
pub fn is_right(mode: &str, megabytes: &str) -> Outcome {
    let outcome = departures(mode, megabytes).run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{mode} ok\n"));
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
    outcome
}

#[test]
fn who_shares_the_memory_outlives_the_program() {
    beside!(&["cc"]);
    // It has no helper any more, so nothing of it goes out.
    is_right("shares", "40");
}

#[test]
fn a_child_forked_beside_an_unmapping_has_what_was_not_unmapped_yet() {
    beside!(&["cc"]);
    // What is made anew is not managed at once, so the limit is not looked at.
    is_right("drops", "24");
}

#[test]
fn a_child_without_a_helper_dies_with_the_supervisor() {
    beside!(&["cc"]);
    for round in 0..2 * u64::from(rounds()) {
        let mut running = departures("raw", "32").start(Limits::Resident(16 * MIB));
        running.wait_for_output(4);
        // By now the child is known to have none.
        std::thread::sleep(Duration::from_millis(500 + 13 * round));
        let processes = running.processes();
        assert!(processes.len() >= 3, "supervisor and two: {processes:?}");
        kill(Pid::from_raw(running.root()), Signal::SIGKILL).expect("memfold is killed");
        must_end(&mut running, &processes, Duration::from_secs(3));
        let outcome = running.wait();
        assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_stopped_program_can_be_read() {
    beside!(&["cc"]);
    let program = Program::new(compiled("debugged", &["debugged.c"], &[]))
        .args(["32", "200"])
        .timeout(Duration::from_secs(120));
    // What is read while it is stopped cannot be moved out, so the limit is not looked at.
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "debugged ok\n");
    // Of 8192 pages, half of which fit; how often it is stopped with pages out depends on the other tests.
    let pages_in = outcome.number("pages_in");
    assert!(pages_in > 2_000.0, "only {pages_in} pages came back");
}

#[test]
fn threads_are_joined_though_their_memory_is_cold() {
    beside!(&["cc"]);
    for stacks in [&["64"][..], &["64", "regions"]] {
        let program = Program::new(compiled("thread_end", &["thread_end.c"], &["-pthread"]))
            .args(stacks)
            // Otherwise the kernel writes to the stack's last page after the sleep.
            .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let outcome = program.run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        if outcome.text() == "no guard regions\n" {
            skip("guard regions (Linux 6.13)");
            continue;
        }
        assert_eq!(outcome.text(), "joined 8\n");
    }
}

#[test]
fn a_stopped_program_does_not_hold_up_the_others() {
    beside!(&["cc", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    // Two programs; the first writes nothing to the common output.
    let script = "\"$0\" 32 0 \"$1\" > /dev/null & echo $!; exec \"$0\" 32 0 \"$1\"";
    let mut running = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(folder.path().join("result"))
        .start(Limits::Resident(16 * MIB));
    running.wait_for_output(8);
    let first = String::from_utf8_lossy(&running.output_so_far())
        .lines()
        .next()
        .and_then(|line| line.parse().ok())
        .expect("the first program's number");
    let stopped = Pid::from_raw(first);
    for round in 0..15u64 {
        // Somewhere in its batches: now and then its helper is inside the gate.
        std::thread::sleep(Duration::from_micros(20_000 + 700 * round));
        kill(stopped, Signal::SIGSTOP).expect("the program is stopped");
        let before = running.output_so_far().len();
        running.wait_for_output(before + 2);
        kill(stopped, Signal::SIGCONT).expect("the program is continued");
    }
    for process in running.processes() {
        if process != running.root() {
            // Some have ended.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
    let outcome = running.wait();
    assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
}
