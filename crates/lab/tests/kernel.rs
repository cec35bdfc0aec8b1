//! `memfold-lab kernel` as a user runs it, at sizes of seconds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

const WRONG_RESULT: i32 = 3;

fn lab() -> Command {
    Command::new(env!("CARGO_BIN_EXE_memfold-lab"))
}

/// Skipping is for people's machines; in CI everything must be there.
fn skip(why: &str) {
    assert!(
        std::env::var_os("CI").is_none(),
        "{why}, and CI skips nothing"
    );
    eprintln!("SKIPPED: {why}");
}

fn rows(output: &Output) -> Vec<Value> {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let json: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(json["host"].is_string() && json["commit"].is_string());
    json["rows"].as_array().expect("rows").clone()
}

fn value(rows: &[Value], contestant: &str, workload: &str, metric: &str) -> f64 {
    let wanted = |row: &&Value| {
        row["contestant"] == contestant && row["workload"] == workload && row["metric"] == metric
    };
    let row = rows.iter().find(wanted);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {workload} under {contestant}"));
    assert_eq!(row["runs"], 2);
    row["value"].as_f64().expect("a number")
}

#[test]
fn synthetic_workloads_run_natively_and_are_verified() {
    let output = lab()
        .args([
            "kernel",
            "--json",
            "--against",
            "native",
            "--scale",
            "0.02",
            "--runs",
            "2",
        ])
        .args(["--workload", "munmap-64,swap,usemem,memhog,zipf,exit"])
        .output()
        .unwrap();
    let rows = rows(&output);
    for (workload, metric) in [
        ("munmap-64", "munmap_ms"),
        ("page-out", "throughput_mib_per_s"),
        ("swap-in-random", "latency_p99_us"),
        ("usemem", "free_ms"),
        ("memhog", "seconds"),
        ("zipf", "operations_per_s"),
        ("exit", "newcomer_ms"),
    ] {
        assert!(value(&rows, "native", workload, metric) > 0.0);
    }
    // Without zram there is nothing to compare with.
    assert!(rows.iter().all(|row| row["ratio_to_zram"].is_null()));
}

#[test]
fn memfold_pages_a_workload_out_and_in() {
    let memfold = PathBuf::from(env!("CARGO_BIN_EXE_memfold-lab")).with_file_name("memfold");
    if !memfold.exists() {
        return skip("memfold is not built (cargo build -p memfold-cli)");
    }
    let output = lab()
        .args([
            "kernel",
            "--json",
            "--against",
            "native,memfold",
            "--scale",
            "0.15",
            "--runs",
            "2",
        ])
        .args(["--workload", "page-out,munmap-64,swap-in-sequential"])
        .output()
        .unwrap();
    let rows = rows(&output);
    assert!(value(&rows, "memfold", "page-out", "peak_pool_mib") > 0.0);
    assert!(value(&rows, "memfold", "page-out", "cpu_supervisor_s") > 0.0);
    assert!(value(&rows, "memfold", "munmap-64", "munmap_ms") > 0.0);
    assert!(value(&rows, "memfold", "swap-in-sequential", "seconds") > 0.0);
}

#[test]
fn every_workload_sees_one_wrong_bit() {
    for workload in [
        "page-out", "memhog", "usemem", "zipf", "munmap", "swap-in", "exit",
    ] {
        let run = |spoil: &[&str]| {
            let mut command = lab();
            command.args(["workload", workload, "--megabytes", "8", "--processes", "2"]);
            command
                .args(["--operations", "1000"])
                .args(spoil)
                .output()
                .unwrap()
        };
        let good = run(&[]);
        assert!(good.status.success(), "{workload}: {good:?}");
        let spoilt = run(&["--spoil", "1"]);
        assert_eq!(
            spoilt.status.code(),
            Some(WRONG_RESULT),
            "{workload}: {spoilt:?}"
        );
        assert!(
            String::from_utf8_lossy(&spoilt.stderr).contains("WRONG RESULT"),
            "{workload}"
        );
    }
}

#[test]
fn bad_words_end_at_once_with_one_line() {
    for (words, expected) in [
        (["--against", "zramm"], "no contestant"),
        (["--workload", "munmap-65"], "no workload"),
        (["--scale", "none"], "--scale"),
        (
            ["--memfold", "/nowhere/memfold"],
            "cargo build --release -p memfold-cli",
        ),
    ] {
        let mut command = lab();
        command.arg("kernel").args(words);
        if words[0] != "--against" {
            command.args(["--against", "memfold"]);
        }
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(125), "{words:?}: {error}");
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}

/// What the lab has set up: its cgroups, and what the host swaps to.
fn traces(lab: u32) -> Vec<String> {
    let mut found = Vec::new();
    let prefix = format!("memfold-lab-{lab}-");
    for parent in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"] {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        found.extend(names.filter(|name| name.starts_with(&prefix)));
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    found.extend(swaps.lines().skip(1).map(str::to_owned));
    found
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_host_is_as_before_after_the_lab_was_killed_or_interrupted() {
    // SAFETY: the call has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root || !Path::new("/sys/class/zram-control").exists() {
        return skip("setting up zram needs root and a kernel that has it");
    }
    if fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1 {
        return skip("other swap is in use");
    }
    let devices = || fs::read_dir("/sys/block").unwrap().count();
    let before = devices();
    for signal in [libc::SIGKILL, libc::SIGINT] {
        let mut child = lab()
            .args([
                "kernel",
                "--against",
                "zram:lz4",
                "--workload",
                "usemem",
                "--scale",
                "0.5",
            ])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = child.id();
        // Both the swap and the cgroup are there, and the workload runs.
        wait_until("the lab sets zram up", || traces(process).len() >= 2);
        // SAFETY: a signal to a process of ours.
        unsafe { libc::kill(process.cast_signed(), signal) };
        let status = child.wait().unwrap();
        assert!(!status.success());
        if signal == libc::SIGINT {
            // It had time to put everything back before it ended.
            assert_eq!(status.code(), Some(128 + libc::SIGINT));
            assert_eq!(traces(process), Vec::<String>::new());
        }
        wait_until("everything is put back", || {
            traces(process).is_empty() && devices() == before
        });
    }
}
