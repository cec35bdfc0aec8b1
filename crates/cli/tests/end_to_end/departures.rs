//! Programs that part from their memory in unusual ways: the parent of a fork ends at once, the
//! main thread ends before the others, threads end without a touch, a child has no helper, a helper is
//! stopped, a whole program is.

use crate::support::{Limits, MIB, Outcome, Program, alone, available, compiled, is_alive, skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn departures(mode: &str, megabytes: &str) -> Program {
    Program::new(compiled("departures", &["departures.c"], &[]))
        .args([mode, megabytes])
        .timeout(Duration::from_secs(120))
}

/// Nothing if it was skipped.
fn is_right(mode: &str, megabytes: &str) -> Option<Outcome> {
    if !available(mode, &["cc"]) {
        return None;
    }
    let _guard = alone();
    let outcome = departures(mode, megabytes).run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), format!("{mode} ok\n"));
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
    Some(outcome)
}

fn ends_well(mode: &str, megabytes: &str) {
    if let Some(outcome) = is_right(mode, megabytes) {
        outcome.assert_limit_held();
    }
}

#[test]
fn children_outlive_a_parent_that_ends_or_executes_right_after_the_fork() {
    ends_well("left", "32");
}

#[test]
fn a_program_outlives_its_main_thread() {
    ends_well("main", "40");
}

#[test]
fn who_shares_the_memory_outlives_the_program() {
    // It has no helper any more, so nothing of it goes out.
    is_right("shares", "40");
}

#[test]
fn a_fork_beside_moves_sees_one_moment() {
    ends_well("race", "24");
}

#[test]
fn a_fork_beside_moves_that_leave_their_mapping_sees_one_moment() {
    ends_well("stays", "24");
}

#[test]
fn a_fork_beside_moves_over_what_is_in_use_sees_one_moment() {
    ends_well("over", "24");
}

#[test]
fn a_child_forked_beside_an_unmapping_has_what_was_not_unmapped_yet() {
    // What is made anew is not managed at once, so the limit is not looked at.
    is_right("drops", "24");
}

#[test]
fn a_child_without_a_helper_dies_with_the_supervisor() {
    if !available("child without a helper", &["cc"]) {
        return;
    }
    let _guard = alone();
    for round in 0..4 {
        let mut running = departures("raw", "32").start(Limits::Resident(16 * MIB));
        running.wait_for_output(4);
        // By now the child is known to have none.
        std::thread::sleep(Duration::from_millis(500 + 13 * round));
        let processes = running.processes();
        assert!(processes.len() >= 3, "supervisor and two: {processes:?}");
        kill(Pid::from_raw(running.root()), Signal::SIGKILL).expect("memfold is killed");
        let began = Instant::now();
        while processes.iter().any(|&process| is_alive(process)) {
            running.has_ended();
            if began.elapsed() > Duration::from_secs(3) {
                running.give_up("processes outlive the supervisor");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let outcome = running.wait();
        assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
    }
}

#[test]
fn a_stopped_program_can_be_read() {
    if !available("debugged", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("debugged", &["debugged.c"], &[]))
        .args(["32", "200"])
        .timeout(Duration::from_secs(120));
    // What is read while it is stopped cannot be moved out, so the limit is not looked at.
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "debugged ok\n");
    assert!(
        outcome.number("pages_in") > 10_000.0,
        "hardly anything was out"
    );
}

#[test]
fn a_tracer_shares_the_limit_of_what_it_traces() {
    if !available("traced", &["cc"]) {
        return;
    }
    let _guard = alone();
    let program = Program::new(compiled("traced", &["traced.c"], &[])).args(["40", "8"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "traced ok\n");
    outcome.assert_swapped(48 * MIB);
    outcome.assert_limit_held();
    // The tracer's pages are not sent out only because the program's cannot be at the moment.
    let out = outcome.number("pages_out") * 4096.0 / MIB as f64;
    assert!(
        out < 4.0 * 48.0,
        "{out} MiB went out, of 48 used three times"
    );
}

#[test]
fn threads_are_joined_though_their_memory_is_cold() {
    if !available("ends of threads", &["cc"]) {
        return;
    }
    let _guard = alone();
    for stacks in [&["64"][..], &["64", "regions"]] {
        let program = Program::new(compiled("thread_end", &["thread_end.c"], &["-pthread"]))
            .args(stacks)
            // Otherwise the kernel writes to the stack's last page after the sleep.
            .env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
        let outcome = program.run(Limits::Resident(16 * MIB));
        outcome.assert_success();
        if outcome.text() == "no guard regions\n" {
            skip("ends of threads", "guard regions (Linux 6.13)");
            continue;
        }
        assert_eq!(outcome.text(), "joined 8\n");
    }
}

#[test]
fn a_stopped_program_does_not_hold_up_the_others() {
    if !available("stopped program", &["cc", "sh"]) {
        return;
    }
    let _guard = alone();
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

/// A control group in which one process is frozen; thawed and removed in the end.
struct Frozen(PathBuf);

impl Frozen {
    /// `None` where there is no freezer.
    fn process(process: i32) -> Option<Frozen> {
        let name = format!("memfold-test-{}", std::process::id());
        let legacy = Path::new("/sys/fs/cgroup/freezer");
        let folder = if legacy.is_dir() {
            legacy.join(name)
        } else {
            Path::new("/sys/fs/cgroup").join(name)
        };
        fs::create_dir(&folder).ok()?;
        let frozen = Frozen(folder);
        fs::write(frozen.0.join("cgroup.procs"), process.to_string()).ok()?;
        frozen.set(true).then_some(frozen)
    }

    fn set(&self, frozen: bool) -> bool {
        let (legacy, unified) = if frozen {
            ("FROZEN", "1")
        } else {
            ("THAWED", "0")
        };
        fs::write(self.0.join("freezer.state"), legacy).is_ok()
            || fs::write(self.0.join("cgroup.freeze"), unified).is_ok()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.set(false);
        let processes = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        for process in processes.lines().filter_map(|line| line.parse().ok()) {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A frozen program looks like one that sleeps: its helper leaves its commands alone.
#[test]
fn a_frozen_program_does_not_hold_up_the_others() {
    if !available("frozen program", &["cc", "sh"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    // The second grows once the first is frozen, which holds most of what there is by then.
    let script = "\"$0\" 60 0 \"$1\" > /dev/null & echo $!
                  while ! [ -e \"$2\" ]; do sleep 0.05; done; exec \"$0\" 60 0 \"$1\"";
    let sign = folder.path().join("sign");
    let mut running = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(folder.path().join("result"))
        .arg(&sign)
        .start(Limits::Resident(64 * MIB));
    running.wait_for_output(2);
    std::thread::sleep(Duration::from_secs(2));
    let first = String::from_utf8_lossy(&running.output_so_far())
        .lines()
        .next()
        .and_then(|line| line.parse().ok())
        .expect("the first program's number");
    let frozen = Frozen::process(first);
    if frozen.is_some() {
        let (began, before) = (Instant::now(), running.output_so_far().len());
        fs::write(&sign, "").expect("the sign");
        running.wait_for_output(before + 12);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(10), "12 rounds took {took:?}");
    } else {
        skip("frozen program", "a freezer that may be used");
    }
    drop(frozen);
    for process in running.processes() {
        if process != running.root() {
            // Some have ended.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
    let outcome = running.wait();
    assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
}
