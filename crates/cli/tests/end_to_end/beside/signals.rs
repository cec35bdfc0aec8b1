//! Signals reach the program that memfold runs, also those that the kernel sends to memfold alone.

use crate::support::{Limits, MIB, Program, memfold};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// Batch systems send it before they end a job.
#[test]
fn a_warning_of_cpu_time_reaches_the_program() {
    beside!(&["sh"]);
    let script = "trap 'exit 3' XCPU; echo ready; while :; do sleep 0.1; done";
    let mut running = Program::new("sh")
        .args(["-c", script])
        .timeout(PATIENCE)
        .start(Limits::Resident(16 * MIB));
    running.wait_for_output(6);
    kill(Pid::from_raw(running.root()), Signal::SIGXCPU).expect("it is sent");
    let outcome = running.wait();
    assert_eq!(outcome.code(), 3, "{}", outcome.errors);
}

/// A timer outlives `exec`, and is memfold's then.
#[test]
fn a_timer_that_was_set_before_ends_the_program() {
    beside!(&["python3"]);
    let launcher = "import os, signal, sys; signal.alarm(1); os.execv(sys.argv[1], sys.argv[1:])";
    let status = Command::new("timeout")
        .args(["30", "python3", "-c", launcher])
        .arg(memfold())
        .args(["run", "--limit", "64M", "--", "sleep", "20"])
        .status()
        .expect("it runs");
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    assert_eq!(code, Some(128 + Signal::SIGALRM as i32), "{status}");
}

/// The kernel tells the leader of the session alone.
#[test]
fn a_lost_terminal_ends_the_program() {
    beside!(&["python3", "sh"]);
    let owner = "\
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
os.read(terminal, 5)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    let script = "trap 'exit 7' HUP; echo ready; while :; do sleep 0.1; done";
    let status = Command::new("timeout")
        .args(["30", "python3", "-c", owner])
        .arg(memfold())
        .args(["run", "--limit", "64M", "--", "sh", "-c", script])
        .status()
        .expect("it runs");
    assert_eq!(status.code(), Some(7), "{status}");
}
