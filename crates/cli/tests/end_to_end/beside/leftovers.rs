//! What a program leaves running when it ends, and memfold must neither end nor wait for in vain.

use crate::support::{Limits, MIB, Program, compiled};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LIMIT: Limits = Limits::Resident(16 * MIB);

fn leftover() -> PathBuf {
    compiled("leftover", &["leftover.c"], &[])
}

#[test]
fn a_leftover_lives_on_without_its_main_thread() {
    beside!(&["cc", "sh"]);
    let outcome = Program::new("sh")
        .args(["-c", "\"$0\" thread & sleep 0.5"])
        .arg(leftover())
        .timeout(Duration::from_secs(30))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "line 0\nline 1\nline 2\nline 3\nline 4\n");
}

#[test]
fn a_leftover_of_a_daemon_that_forks_twice_lives_on() {
    beside!(&["sh"]);
    let outcome = Program::new("sh")
        .args(["-c", "(sh -c 'sleep 0.7; echo done' &) & exit 0"])
        .timeout(Duration::from_secs(30))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "done\n");
}

#[test]
fn a_leftover_without_a_helper_can_be_interrupted() {
    beside!(&["cc"]);
    let mut running = Program::new(leftover())
        .arg("raw")
        .timeout(Duration::from_secs(30))
        .start(LIMIT);
    running.wait_for_output(5);
    // Long enough to be taken for one that never connects.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!running.has_ended(), "what it left has memory in memfold");
    kill(Pid::from_raw(running.root()), Signal::SIGINT).expect("memfold is interrupted");
    let began = Instant::now();
    let outcome = running.wait();
    let took = began.elapsed().saturating_sub(outcome.pause);
    assert!(took < Duration::from_secs(3), "it ended after {took:?}");
    outcome.assert_success();
    assert!(
        outcome.errors.contains("waiting for the processes"),
        "{}",
        outcome.errors
    );
    assert!(
        !outcome.errors.contains("userfaultfd"),
        "{}",
        outcome.errors
    );
}
