//! Whichever process dies, no program ever reads wrong memory, and nothing is left behind.

use crate::support::{
    Limits, MIB, Outcome, Program, Running, compiled, is_alive, is_runnable, python, rounds,
};
use memfold_sys::process;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

pub fn verifier(file: &Path) -> Program {
    Program::new(compiled("verify", &["verify.c"], &[]))
        .args(["64", "0"])
        .arg(file)
}

pub fn send(signal: Signal, process: i32) {
    kill(Pid::from_raw(process), signal).expect("the process takes the signal");
}

/// Waits until all of these are gone; fails if they are not in this time.
pub fn must_end(running: &mut Running, processes: &[i32], within: Duration) {
    if !end(running, processes, within) {
        running.give_up("processes are still alive after the kill");
    }
}

/// Whether all of these are gone in this time. Many looks must have shown that they are not: the machine itself may
/// stand still for longer, or one CPU of it, which shows as a thread that could run. Some may run for ever.
fn end(running: &mut Running, processes: &[i32], within: Duration) -> bool {
    const LEAST_LOOKS: u32 = 100;
    const MOST: u32 = 20;
    let started = Instant::now();
    let mut looks = 0;
    while processes.iter().any(|&process| is_alive(process)) {
        running.has_ended();
        let is_longest = started.elapsed() > within * MOST;
        let is_any_runnable = running.processes().into_iter().any(is_runnable);
        looks += u32::from(is_longest || !is_any_runnable);
        if started.elapsed() > within && looks > LEAST_LOOKS {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Kills the supervisor of a run, of which there must be at least `least` processes: all must end with it.
fn kill_supervisor(mut running: Running, least: usize) -> Outcome {
    let processes = running.processes();
    assert!(processes.len() >= least, "{least} or more: {processes:?}");
    send(Signal::SIGKILL, running.root());
    must_end(&mut running, &processes, Duration::from_secs(2));
    running.wait()
}

#[test]
fn the_supervisors_death_ends_the_program_before_it_reads_anything_wrong() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    for round in 0..6 * rounds() {
        let file = folder.path().join(format!("result-{round}"));
        let mut running = verifier(&file).start(Limits::Resident(16 * MIB));
        running.wait_for_output(1 + round as usize % 3);
        // At another moment of its rounds each time.
        std::thread::sleep(Duration::from_millis(7 * u64::from(round)));
        let processes = running.processes();
        assert!(
            processes.len() >= 2,
            "supervisor and program: {processes:?}"
        );
        send(Signal::SIGKILL, running.root());
        must_end(&mut running, &processes, Duration::from_secs(2));
        let outcome = running.wait();
        let result = fs::read_to_string(&file).expect("the result file");
        assert_eq!(result, "", "round {round}: {}", outcome.text());
        assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
        assert!(
            outcome.errors.contains("memfold"),
            "the program's end is explained on stderr: {:?}",
            outcome.errors
        );
    }
}

#[test]
fn the_supervisors_death_ends_children_and_grandchildren() {
    beside!(&["cc", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("result");
    let verify = compiled("verify", &["verify.c"], &[]);
    let script = "\"$0\" 32 0 \"$1\" & (\"$0\" 32 0 \"$1\" & wait) & wait";
    let program = Program::new("sh")
        .args(["-c", script])
        .arg(verify)
        .arg(&file);
    let mut running = program.start(Limits::Resident(16 * MIB));
    running.wait_for_output(6);
    // Itself, shells and programs. The shells hold little that memfold manages, but they must not go on
    // either.
    kill_supervisor(running, 5);
    assert_eq!(fs::read_to_string(&file).expect("the result file"), "");
}

#[test]
fn the_supervisors_death_ends_the_child_of_a_prepared_fork() {
    beside!(&["python3"]);
    let script = "
import os
data = bytearray(32 << 20)
for page in range(0, len(data), 4096):
    data[page:page + 8] = page.to_bytes(8, 'little')
child = os.fork()
print('forked', flush=True)
while True:
    for page in range(0, len(data), 4096):
        if data[page:page + 8] != page.to_bytes(8, 'little'):
            print('MISMATCH', flush=True)
";
    for _ in 0..rounds() {
        let program = Program::new(python())
            .args(["-c", script])
            .memfold_options(["--prepare-forks"]);
        let mut running = program.start(Limits::Resident(16 * MIB));
        running.wait_for_output(14);
        // Itself, the program and the child, which go on to read for as long as they live.
        let outcome = kill_supervisor(running, 3);
        assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
    }
}

/// The message would wait for a reader.
#[test]
fn the_supervisors_death_ends_a_program_whose_standard_error_is_a_full_pipe() {
    beside!(&["python3"]);
    let script = "
import os, time
data = bytearray(32 << 20)
for page in range(0, len(data), 4096):
    data[page] = 1
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(4096))
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
print('full', flush=True)
while True:
    time.sleep(1)
";
    let program = Program::new(python()).args(["-c", script]);
    let mut running = program.start(Limits::Resident(16 * MIB));
    running.wait_for_output(5);
    // Itself and the program.
    kill_supervisor(running, 2);
}

#[test]
fn the_supervisors_death_ends_a_filtered_child_that_needed_nothing() {
    beside!(&["cc"]);
    let program = Program::new(compiled("quiet", &["quiet.c"], &[])).arg("48");
    // The child has no helper, which would end it: until it is guarded, for which it must be found.
    for seconds in [1, 3, 9] {
        let mut running = program.start(Limits::Resident(16 * MIB));
        running.wait_for_output(1);
        std::thread::sleep(Duration::from_secs(seconds));
        let processes = running.processes();
        assert!(
            processes.len() >= 3,
            "itself, the program and the child: {processes:?}"
        );
        send(Signal::SIGKILL, running.root());
        if end(&mut running, &processes, Duration::from_secs(2)) {
            running.wait();
            return;
        }
        eprintln!("not guarded after {seconds} s");
        for process in processes {
            // Some have ended.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        running.wait();
    }
    panic!("a child without a helper outlives the supervisor");
}

#[test]
fn signals_to_memfold_reach_the_program() {
    beside!(&["sh"]);
    let script = "trap 'echo terminated; exit 7' TERM; trap 'echo hung up' HUP; echo ready; \
                  while :; do sleep 0.02; done";
    let mut running = Program::new("sh")
        .args(["-c", script])
        .start(Limits::Total(64 * MIB));
    running.wait_for_output(6);
    send(Signal::SIGHUP, running.root());
    running.wait_for_output(6 + 8);
    send(Signal::SIGTERM, running.root());
    let outcome = running.wait();
    assert_eq!(outcome.code(), 7);
    assert_eq!(outcome.text(), "ready\nhung up\nterminated\n");
}

#[test]
fn a_process_that_shares_a_programs_memory_reads_no_zeros_after_the_supervisors_death() {
    beside!(&["cc"]);
    ends_without_reading_zeros(&["64"]);
}

#[test]
fn a_child_forked_just_before_the_supervisors_death_ends_and_reads_no_zeros() {
    beside!(&["cc"]);
    for _ in 0..2 * rounds() {
        ends_without_reading_zeros(&["64", "forked"]);
    }
}

/// Runs `sharer`, the last process of which kills memfold. Its faults are handled no more then, and no helper ends it: the
/// next one does, once helpers had their time.
fn ends_without_reading_zeros(arguments: &[&str]) {
    let program = Program::new(compiled("sharer", &["sharer.c"], &[])).args(arguments);
    let mut running = program.start(Limits::Resident(16 * MIB));
    let alone = last_process(&mut running);
    if has_all(alone) {
        let _ = kill(Pid::from_raw(alone), Signal::SIGKILL);
    }
    must_end(&mut running, &[alone], Duration::from_secs(5));
    let outcome = running.wait();
    assert_eq!(outcome.text(), format!("alone {alone}\n"));
}

/// Whether a process has all its 64 MiB in memory without memfold. What shares the memory of a program that ended is brought
/// back after a while, and on a busy machine memfold may have lived for so long.
fn has_all(pid: i32) -> bool {
    // It kills memfold right after its line.
    std::thread::sleep(Duration::from_millis(100));
    process::sizes(pid).is_some_and(|sizes| sizes.resident_pages >= 64 * MIB / 4096)
}

/// The process that `sharer` says will outlive the others.
fn last_process(running: &mut Running) -> i32 {
    let started = Instant::now();
    loop {
        let output = String::from_utf8(running.output_so_far()).expect("text");
        let said = output.split_once('\n').map(|(line, _)| line);
        if let Some(number) = said.and_then(|line| line.strip_prefix("alone ")) {
            return number.parse().expect("a process");
        }
        if started.elapsed() > Duration::from_secs(60) {
            running.give_up("says nothing");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
