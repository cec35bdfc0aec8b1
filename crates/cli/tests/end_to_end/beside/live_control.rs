//! The limit of a run changed while it goes on, memory paged out on command, and the lines of
//! `stat --watch`.

use crate::support::{Limits, MIB, OTHER, Program, Running, Stage, as_user, memfold, python};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Touches 200 MiB that compress well, says so, and stays until a signal.
const STAYS: &str = "\
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
b = bytearray(200 << 20)
for at in range(0, len(b), 4096):
    b[at] = (at >> 12) & 255
print('ready', flush=True)
signal.sigwait([signal.SIGTERM])
print(sum(b[at] for at in range(0, len(b), 4096)))
";
/// What that prints at its end.
const SUM: &str = "ready\n6528000\n";

fn stays() -> Program {
    Program::new(python()).args(["-c", STAYS])
}

fn command(arguments: &[&str]) -> Output {
    Command::new(memfold())
        .args(arguments)
        .output()
        .expect("memfold runs")
}

fn ready(program: &Program, limit: u64) -> Running {
    let mut run = program.start(Limits::Total(limit));
    run.wait_for_output("ready".len());
    run
}

#[track_caller]
fn done(arguments: &[&str]) -> String {
    let output = command(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn number(run: &Running, name: &str) -> u64 {
    run.statistics()[name].as_u64().expect("a number")
}

/// Statistics are of the last sample, which a busy machine takes late.
const LATEST_SAMPLE: Duration = Duration::from_secs(30);

/// What is resident once the statistics, which are of the last sample, show so much and do not change any more.
fn settled_resident(run: &Running, at_least: u64) -> u64 {
    let began = Instant::now();
    let mut before = 0;
    loop {
        let resident = number(run, "resident_bytes");
        if resident >= at_least && resident == before {
            return resident;
        }
        assert!(began.elapsed() < LATEST_SAMPLE, "{resident} bytes");
        before = resident;
        // Longer than from one sample to the next.
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[track_caller]
fn assert_soon_at_most(run: &Running, most: u64) {
    let began = Instant::now();
    while number(run, "resident_bytes") > most {
        let waited = began.elapsed();
        assert!(waited < LATEST_SAMPLE, "{}", run.statistics());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_limit_changes_while_a_program_runs() {
    beside!(&["python3"]);
    let run = ready(&stays(), 400 * MIB);
    let pid = run.root().to_string();
    let text = done(&["limit", &pid, "100M"]);
    assert!(text.contains("400 MiB -> 100 MiB"), "{text}");
    assert_eq!(number(&run, "limit_bytes"), 100 * MIB);
    assert_soon_at_most(&run, 100 * MIB);
    let text = done(&["limit", &pid, "64MB", "--resident"]);
    assert!(text.starts_with("resident limit of run"), "{text}");
    assert_soon_at_most(&run, 64 * MIB);
    let text = done(&["limit", &pid, "1G"]);
    assert!(text.contains("100 MiB -> 1.0 GiB"), "{text}");
    let outcome = run.terminate();
    outcome.assert_success();
    assert_eq!(outcome.text(), SUM);
    let stats = outcome.stats.as_ref().expect("statistics");
    assert_eq!(stats["limit_kept"], true, "{stats}");
    assert!(!outcome.errors.contains("NOT kept"), "{}", outcome.errors);
}

#[test]
fn memory_goes_out_on_command() {
    beside!(&["python3"]);
    let run = ready(&stays(), 1024 * MIB);
    // By the program's PID as well.
    let program = run.program().to_string();
    let before = settled_resident(&run, 200 * MIB);
    let text = done(&["reclaim", &program, "50M"]);
    assert!(text.contains("paged out"), "{text}");
    // The program may have touched a few pages since.
    assert_soon_at_most(&run, before - 48 * MIB);
    let after = number(&run, "resident_bytes");
    assert!(after + 90 * MIB >= before, "from {before} to {after}");
    // A command that ends leaves what another one asks for.
    let mut long = Command::new(memfold())
        .args(["reclaim", &program, "100M"])
        .stdout(Stdio::null())
        .spawn()
        .expect("memfold runs");
    std::thread::sleep(Duration::from_millis(30));
    done(&["reclaim", &program, "1M"]);
    let status = long.wait().expect("it ends");
    assert!(status.success(), "{status}");
    done(&["reclaim", &program]);
    assert_soon_at_most(&run, 20 * MIB);
    let output = command(&["reclaim", &program, "500M"]);
    assert_eq!(output.status.code(), Some(1), "that much is not there");
    let outcome = run.terminate();
    outcome.assert_success();
    assert_eq!(outcome.text(), SUM);
    assert!(!outcome.errors.contains("exceeded"), "{}", outcome.errors);
}

/// Goes round 100 MiB without a pause, until a signal ends it.
const ROUND: &str = "\
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
b = bytearray(100 << 20)
for at in range(0, len(b), 4096):
    b[at] = (at >> 12) & 255
print('ready', flush=True)
while True:
    for at in range(0, len(b), 4096):
        b[at] ^= 1
";

#[test]
fn what_a_busy_program_brings_back_has_been_paged_out() {
    beside!(&["python3"]);
    let program = Program::new(python()).args(["-c", ROUND]);
    let run = ready(&program, 1024 * MIB);
    let pid = run.root().to_string();
    // Exit status 0: that much went out.
    done(&["reclaim", &pid, "40M"]);
    let text = done(&["reclaim", &pid]);
    assert!(!text.contains(" 0 B paged out"), "{text}");
    run.terminate().assert_success();
}

#[test]
fn what_cannot_be_done_is_refused_in_one_line() {
    beside!(&["sleep"]);
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    for (arguments, part) in [
        (&["limit", &pid, "1M"][..], "at least 16.0 MiB"),
        (&["limit", &pid, "lots"], "512M"),
        (&["limit", &pid, "200%"], "between 0 and 100"),
        (&["limit", "1", "1G"], "no run or disk of this user"),
        (&["reclaim", "1"], "no run or disk of this user"),
        (&["limit", &pid], "SIZE"),
    ] {
        let output = command(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(
            errors.contains(part) && errors.lines().count() == 1,
            "{errors}"
        );
    }
    assert_eq!(number(&run, "limit_bytes"), 64 * MIB);
    run.terminate().assert_terminated();
}

#[test]
fn another_user_changes_nothing() {
    beside!(&["sleep", "setpriv"]);
    let stage = Stage::new();
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    let output = as_user(OTHER, stage.memfold())
        .args(["limit", &pid, "1G"])
        .output()
        .expect("memfold runs");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(number(&run, "limit_bytes"), 64 * MIB);
    run.terminate().assert_terminated();
}

/// `memfold stat --watch` of a run, and its first line.
fn watching(pid: &str) -> (Child, BufReader<ChildStdout>, String) {
    // On a busy machine the run may not answer the first time, and then it ends.
    for _ in 0..10 {
        let mut watching = Command::new(memfold())
            .args(["stat", "--watch", pid])
            .stdout(Stdio::piped())
            .spawn()
            .expect("memfold runs");
        let mut output = BufReader::new(watching.stdout.take().expect("its output"));
        let mut first = String::new();
        if output.read_line(&mut first).expect("a line") > 0 {
            return (watching, output, first);
        }
        watching.wait().expect("it ends");
    }
    panic!("nothing is shown of run {pid}");
}

#[test]
fn watching_prints_a_line_a_second_until_the_end() {
    beside!(&["sleep"]);
    let run = Program::new("sleep")
        .arg("600")
        .memfold_options(["--name", "nightly"])
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    let began = Instant::now();
    let (mut watching, mut output, mut text) = watching(&pid);
    for _ in 0..2 {
        output.read_line(&mut text).expect("a line");
    }
    let outcome = run.terminate();
    output.read_to_string(&mut text).expect("its output");
    assert!(watching.wait().expect("it ends").success(), "{text}");
    let seconds = began.elapsed().as_secs() as usize;
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].contains("LIMIT") && lines[0].contains("COMMAND"),
        "{text}"
    );
    // The first is of the beginning.
    assert!((3..=seconds + 2).contains(&lines.len()), "{text}");
    assert!(
        lines[1..].iter().all(|line| line.ends_with("nightly")),
        "{text}"
    );
    outcome.assert_terminated();
    let stats = outcome.stats.as_ref().expect("statistics");
    assert_eq!(stats["name"], "nightly");
    assert_eq!(stats["command"], "sleep 600");
    let output = command(&["stat", "--watch", "--json", &pid]);
    assert_eq!(output.status.code(), Some(1), "nothing runs any more");
}
