//! Signals reach the program that memfold runs, also those that the kernel sends to memfold alone.

use crate::support::{Limits, MIB, Program, memfold};
use memfold_testing::store::{StoreServer, store_programs};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
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

/// memfold waits for a store meanwhile, as long as it takes to connect.
#[test]
fn an_interrupt_before_the_program_starts_ends_the_run() {
    let [server, client] = store_programs();
    beside!(&["python3", "touch", server, client]);
    let owner = "\
import os, pty, sys, time
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
time.sleep(0.5)
os.write(terminal, b'\\x03')
time.sleep(0.1)
print('sent', flush=True)
sys.exit(128 - os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    let folder = tempfile::tempdir().expect("a temporary directory");
    let store = StoreServer::start(folder.path(), &[]);
    let started = folder.path().join("started");
    store.pause(true);
    let mut terminal = Command::new("timeout")
        .args(["30", "python3", "-c", owner])
        .arg(memfold())
        .args(["run", "--limit", "64M", "--remote"])
        .arg(format!("valkey://127.0.0.1:{}", store.port))
        .args(["--", "touch"])
        .arg(&started)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let output = terminal.stdout.take().expect("a pipe");
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).expect("a line");
    store.pause(false);
    let status = terminal.wait().expect("it ends");
    assert_eq!(line, "sent\n", "{status}");
    let expected = 128 + Signal::SIGINT as i32;
    assert_eq!(status.code(), Some(expected), "{status}");
    assert!(!started.exists(), "the program was started");
}
