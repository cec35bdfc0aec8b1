//! Hard limits on descriptors that are too low for a run, or for all of its programs.

use crate::support::{is_alive, memfold, wait_until_taken};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs a shell script under memfold, which may have no more descriptors than this.
fn start(limit: u64, script: &str) -> Child {
    let limited = format!("ulimit -n {limit}; exec \"$0\" run --limit 256M -- bash -c \"$1\"");
    Command::new("bash")
        .args(["-c", &limited])
        .arg(memfold())
        .arg(script)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("bash runs")
}

fn end_of(mut child: Child, within: Duration) -> Output {
    let began = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if began.elapsed() > within {
            child.kill().expect("it can be killed");
            panic!("it hung: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// How many descriptors a run of one program needs, as memfold itself says.
fn needed() -> u64 {
    let errors = errors(&end_of(start(20, "true"), Duration::from_secs(20)));
    let number = errors.split("at least ").nth(1);
    let number = number.and_then(|rest| rest.split(|byte: char| !byte.is_ascii_digit()).next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no number: {errors}"))
}

#[test]
fn a_run_with_too_few_descriptors_says_so_or_works() {
    beside!(&["bash"]);
    for (limit, starts) in [(20, false), (30, false), (40, false), (256, true)] {
        let output = end_of(start(limit, "echo hi"), Duration::from_secs(20));
        let errors = errors(&output);
        if starts {
            assert!(output.status.success(), "{limit}: {errors}");
            continue;
        }
        assert_eq!(output.status.code(), Some(125), "{limit}: {errors}");
        assert!(output.stdout.is_empty(), "{limit}: the program was started");
        assert!(errors.contains("ulimit -n"), "{limit}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{limit}: {errors}");
    }
}

#[test]
fn programs_without_descriptors_run_outside_the_limit() {
    beside!(&["bash", "sleep"]);
    let script = "for i in $(seq 20); do sleep 3 & done; echo started; wait; echo ended";
    let child = start(needed(), script);
    let output = end_of(child, Duration::from_secs(60));
    let errors = errors(&output);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "started\nended\n");
    for said_once in [
        "run unmanaged, outside the limit. Raise",
        "were not under the limit",
    ] {
        assert_eq!(errors.matches(said_once).count(), 1, "{errors}");
    }
    assert!(errors.contains("ulimit -n"), "{errors}");
}

#[test]
fn a_run_with_too_few_descriptors_for_its_programs_can_be_ended() {
    beside!(&["bash", "sleep"]);
    let script = "trap '' TERM; for i in $(seq 20); do sleep 100 & done; echo $! started; wait";
    let mut child = start(needed(), script);
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().expect("its output"));
    output.read_line(&mut line).expect("a line");
    let last = line.split(' ').next().and_then(|pid| pid.parse().ok());
    let last: i32 = last.unwrap_or_else(|| panic!("no PID: {line}"));
    let memfold = Pid::from_raw(child.id().cast_signed());
    for _ in 0..2 {
        kill(memfold, Signal::SIGTERM).expect("memfold is there");
        wait_until_taken(memfold.as_raw(), Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(300));
    }
    let output_ended = end_of(child, Duration::from_secs(20));
    assert!(!output_ended.status.success());
    assert!(!is_alive(last), "{}", errors(&output_ended));
    output.read_to_string(&mut line).expect("the rest");
    assert!(line.ends_with("started\n"), "{line}");
}
