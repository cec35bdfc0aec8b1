//! What does not fit goes to the swap file, what stays cold is moved, and nothing of it shows.

use crate::support::{
    Limits, MIB, Outcome, Program, Running, compiled, memfold, python, short_or_long, source,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn verify(mebibytes: u32, rounds: u32, folder: &Path) -> Program {
    Program::new(compiled("verify", &["verify.c"], &[]))
        .args([mebibytes.to_string(), rounds.to_string()])
        .arg(folder.join("result"))
}

pub fn with_file(program: Program, folder: &Path, size: &str) -> Program {
    program
        .memfold_options(["--swap-size", size, "--swap-file"])
        .memfold_options([folder])
}

/// Nothing is left there.
#[track_caller]
pub fn assert_empty(folder: &Path) {
    assert_eq!(fs::read_dir(folder).expect("the folder").count(), 0);
}

fn warnings(outcome: &Outcome) -> usize {
    outcome
        .errors
        .matches("the swap file takes no more")
        .count()
}

/// Much memory that is not used again, and a little that is, until a file is there.
const MOSTLY_COLD: &str = "
import hashlib, os, sys, time
cold = [bytes([n % 251]) * 4096 for n in range(16384)]
hot = [bytes([n % 251]) * 4096 for n in range(256)]
while not os.path.exists(sys.argv[1]):
    sum(block[n % 4096] for n, block in enumerate(hot))
    time.sleep(0.01)
print(hashlib.sha256(b''.join(cold)).hexdigest())
";

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn proactively_what_stays_cold_leaves_far_below_the_limit() {
    beside!(&["python3"]);
    // A fifth of what is cold. On a busy host little leaves in a second, as faults wait.
    const ENOUGH: u64 = 16384 / 5;
    const LONGEST: Duration = Duration::from_secs(60);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let end = folder.path().join("end");
    let program = Program::new(python()).args(["-c", MOSTLY_COLD]);
    let program = program.arg(&end);
    let run = |program: &Program, is_over: &dyn Fn(u64) -> bool| {
        let running = program.start(Limits::Total(512 * MIB));
        let out = || {
            running.statistics()["pages_out"]
                .as_u64()
                .expect("a number")
        };
        while !is_over(out()) {
            std::thread::sleep(Duration::from_millis(100));
        }
        fs::write(&end, "").expect("a file");
        let outcome = running.wait();
        fs::remove_file(&end).expect("the file");
        outcome.assert_success();
        outcome
    };
    let began = Instant::now();
    let proactively = program.clone().memfold_options(["--proactive"]);
    let proactive = run(&proactively, &|out| {
        assert!(began.elapsed() < LONGEST, "{out} pages went out");
        out > ENOUGH
    });
    let took = began.elapsed();
    let began = Instant::now();
    let without = run(&program, &|_| began.elapsed() >= took);
    assert_eq!(without.number("pages_out"), 0.0);
    fs::write(&end, "").expect("a file");
    let native = program.run(Limits::None);
    native.assert_success();
    for outcome in [proactive, without] {
        assert_eq!(outcome.text(), native.text());
    }
}

#[test]
fn a_full_swap_file_loses_nothing_and_is_said_once() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = with_file(
        verify(96, short_or_long(1, 3), folder.path()),
        folder.path(),
        "2M",
    );
    let limited = program.run(Limits::Total(40 * MIB));
    limited.assert_success();
    assert!(limited.number("pages_written_back") > 0.0);
    assert!(limited.number("peak_file_bytes") <= 2.0 * MIB as f64);
    assert_eq!(warnings(&limited), 1, "{}", limited.errors);
    let quiet = program
        .memfold_options(["--quiet"])
        .run(Limits::Total(40 * MIB));
    quiet.assert_success();
    assert_eq!(quiet.errors, "");
}

/// A file system of two mebibytes, gone when this is dropped.
struct TinyDisk(tempfile::TempDir);

impl TinyDisk {
    fn new() -> Self {
        let disk = TinyDisk(tempfile::tempdir().expect("a temporary directory"));
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2m", "memfold-test"])
            .arg(disk.0.path())
            .status();
        assert!(status.expect("mount runs").success());
        disk
    }
}

impl Drop for TinyDisk {
    fn drop(&mut self) {
        // Nothing holds it any more.
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_loses_nothing_and_is_counted() {
    beside!(&["cc", "mount"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let disk = TinyDisk::new();
    let program = with_file(
        verify(96, short_or_long(1, 3), folder.path()),
        disk.0.path(),
        "1G",
    );
    let limited = program.run(Limits::Total(40 * MIB));
    limited.assert_success();
    assert!(limited.number("file_errors") > 0.0);
    assert_eq!(warnings(&limited), 1, "{}", limited.errors);
}

fn wait_until(run: &mut Running, what: &str, reached: impl Fn(&serde_json::Value) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached(&run.statistics()) {
        if Instant::now() > deadline || run.has_ended() {
            let now = run.statistics();
            eprintln!("{now:#}");
            run.give_up(what);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn cold_pages_are_compressed_again_and_written_and_a_swapoff_brings_them_back() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    // It touches all of its memory once, waits, and then verifies it.
    let program = Program::new(compiled("patient", &["patient.c"], &[]))
        .args(["64"])
        .arg(folder.path().join("go"))
        .memfold_options(["--recompress-after", "1s", "--writeback-after", "2s"]);
    let program = with_file(program, folder.path(), "1G");
    let mut run = program.start(Limits::Resident(24 * MIB));
    run.wait_for_output(1);
    let number = |value: &serde_json::Value, name: &str| value[name].as_u64().expect("a number");
    wait_until(&mut run, "nothing was moved", |now| {
        number(now, "pages_recompressed") > 1000
            && number(now, "pages_written_back") > 5000
            && number(now, "file_bytes") > MIB
    });
    // A sample taken while pages are on their way may have them in one of the two alone.
    wait_until(
        &mut run,
        "its pages are charged to another program",
        |now| {
            let charged = &now["programs"][0];
            number(now, "file_bytes") > MIB
                && charged["file_bytes"] == now["file_bytes"]
                && number(charged, "resident_bytes") > 0
        },
    );
    let before = run.statistics();
    let output = Command::new(memfold())
        .args(["swapoff", &run.root().to_string()])
        .output()
        .expect("memfold swapoff runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(text.contains("are back in memory"), "{text}");
    let after = run.statistics();
    assert_eq!(number(&after, "file_bytes"), 0);
    assert!(number(&after, "pool_bytes") > number(&before, "pool_bytes"));
    // It is not used again.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(number(&run.statistics(), "file_bytes"), 0);
    fs::write(folder.path().join("go"), "").expect("the sign to go on");
    let outcome = run.wait();
    outcome.assert_success();
    assert_eq!(outcome.number("file_errors"), 0.0);
}

#[test]
fn a_swapoff_of_nothing_is_refused() {
    beside!(&["sleep"]);
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    let first = run.program();
    let output = Command::new(memfold())
        .args(["swapoff", &first.to_string()])
        .output()
        .expect("memfold swapoff runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("neither a swap file"), "{text}");
    kill(Pid::from_raw(first), Signal::SIGTERM).expect("sleep takes the signal");
    assert_eq!(run.wait().code(), 128 + Signal::SIGTERM as i32);
}

#[test]
fn zstandard_is_denser_than_lz4() {
    beside!(&["python3"]);
    let stored_once = |algorithm: &str| {
        let program = Program::new(python())
            .args([source("objects.py"), "0.5".into()])
            .memfold_options(["--algo", algorithm, "--recompress-after", "off"]);
        let outcome = program.run(Limits::Resident(60 * MIB));
        outcome.assert_success();
        outcome.number("bytes_stored") / outcome.number("bytes_original")
    };
    // A program that the machine stands still for has its half second at once, and nothing out.
    let stored = |algorithm| {
        let mut ratios = (0..3).map(|_| stored_once(algorithm));
        ratios
            .find(|ratio| !ratio.is_nan())
            .expect("pages went out")
    };
    let (lz4, zstd) = (stored("lz4"), stored("zstd"));
    assert!(zstd < lz4 * 0.9, "{zstd} of the original against {lz4}");
}
