//! A run that is asked twice to end, ends.

use crate::support::{Limits, MIB, Program, is_alive, wait_until_taken};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{File, OpenOptions};
use std::io::{PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

const MOMENT: Duration = Duration::from_millis(300);

/// Sends a signal to memfold, and waits for longer than those of one request come in, from when this one is taken.
fn send(memfold: Pid, signal: Signal) {
    kill(memfold, signal).expect("it is sent");
    wait_until_taken(memfold.as_raw(), signal);
    std::thread::sleep(MOMENT);
}

#[test]
fn a_second_sigterm_ends_a_program_that_ignores_it() {
    beside!(&["sh"]);
    let script = "trap '' TERM INT; sh -c 'sleep 60' & echo ready; while :; do sleep 1; done";
    let mut running = Program::new("sh")
        .args(["-c", script])
        .timeout(Duration::from_secs(30))
        .start(Limits::Resident(16 * MIB));
    running.wait_for_output(6);
    let processes = running.processes();
    let root = Pid::from_raw(running.root());
    // An interactive program is interrupted as often as its user likes.
    for _ in 0..3 {
        send(root, Signal::SIGINT);
    }
    assert!(!running.has_ended());
    let began = Instant::now();
    send(root, Signal::SIGTERM);
    let outcome = running.wait();
    let took = began.elapsed().saturating_sub(outcome.pause);
    assert!(took < Duration::from_secs(5), "it ended after {took:?}");
    assert_eq!(
        outcome.code(),
        128 + Signal::SIGTERM as i32,
        "{}",
        outcome.errors
    );
    assert!(outcome.errors.contains("second time"), "{}", outcome.errors);
    for process in processes {
        assert!(!is_alive(process), "{process} lives on");
    }
}

#[test]
fn signals_are_taken_while_messages_cannot_be_written() {
    beside!(&["sh"]);
    let (reading, writing) = std::io::pipe().expect("a pipe");
    let pipe = opened_without_waiting(&writing);
    let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let mut running = std::process::Command::new(crate::support::memfold())
        .args(["run", "--limit", "64M", "--", "sh", "-c", script])
        .stdout(std::process::Stdio::piped())
        .stderr(writing)
        .spawn()
        .expect("memfold runs");
    let mut line = String::new();
    let output = running.stdout.take().expect("its output");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).expect("a line");
    fill(pipe);
    let root = Pid::from_raw(running.id() as i32);
    for _ in 0..2 {
        send(root, Signal::SIGTERM);
    }
    let began = Instant::now();
    while running.try_wait().expect("it is asked").is_none() {
        if began.elapsed() > Duration::from_secs(15) {
            running.kill().expect("it is killed");
            running.wait().expect("it ends");
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(reading);
}

/// The same pipe, opened once more: that writes here do not wait is not for memfold to see.
fn opened_without_waiting(pipe: &PipeWriter) -> File {
    OpenOptions::new()
        .write(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))
        .expect("the pipe is opened")
}

/// Nothing more can be written to the pipe, as it is not read.
fn fill(mut pipe: File) {
    for bytes in [&[0; 4096][..], &[0]] {
        while pipe.write(bytes).is_ok() {}
    }
}
