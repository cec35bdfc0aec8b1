//! `memfold-lab kernel` end to end, at a small scale.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use memfold_testing::skip;

use crate::{lab, memfold_is_built};

const WRONG_RESULT: i32 = 3;

fn rows(output: &Output) -> Vec<Value> {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let json: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert!(json["host"].is_string() && json["commit"].is_string());
    json["rows"].as_array().expect("rows").clone()
}

fn value(rows: &[Value], backend: &str, workload: &str, metric: &str) -> f64 {
    let wanted = |row: &&Value| {
        row["contestant"] == backend && row["workload"] == workload && row["metric"] == metric
    };
    let row = rows.iter().find(wanted);
    let row = row.unwrap_or_else(|| panic!("no {metric} of {workload} under {backend}"));
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
    let names = [
        "contestant",
        "workload",
        "megabytes",
        "processes",
        "metric",
        "value",
        "unit",
    ];
    crate::schema::rows(&output, "kernel", &names);
    let names = ["ratio_to_zram", "comparison", "total_megabytes"];
    crate::schema::rows(&output, "kernel", &names);
    // Without zram there is no reference for the ratio.
    assert!(rows.iter().all(|row| row["ratio_to_zram"].is_null()));
}

#[test]
fn memfold_pages_a_workload_out_and_in() {
    if !memfold_is_built() {
        return;
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
fn every_workload_detects_one_wrong_bit() {
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
fn a_bad_argument_fails_with_a_one_line_error() {
    for (words, expected) in [
        (["--against", "zramm"], "unknown backend"),
        (["--workload", "munmap-65"], "unknown workload"),
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

/// What the lab has set up on the host: cgroups, swap areas, its swap file.
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
    let file = format!("/var/tmp/memfold-lab-{lab}.swap");
    found.extend(fs::exists(&file).unwrap().then_some(file));
    found
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// zswap's module parameters, if the kernel has zswap.
fn zswap() -> Vec<String> {
    let folder = fs::read_dir("/sys/module/zswap/parameters");
    let files = folder.into_iter().flatten().flatten();
    let mut texts: Vec<String> = files
        .map(|file| {
            format!(
                "{} {:?}",
                file.path().display(),
                fs::read(file.path()).unwrap()
            )
        })
        .collect();
    texts.sort();
    texts
}

/// How to terminate the lab.
#[derive(Debug, Clone, Copy)]
struct End {
    signal: libc::c_int,
    /// Whether to signal its whole process group, as a terminal does.
    group: bool,
    against: &'static str,
}

fn end_the_lab(end: End) {
    let devices = || fs::read_dir("/sys/block").unwrap().count();
    let before = (devices(), zswap());
    let temporary = tempfile::tempdir().unwrap();
    let mut child = lab()
        .args(["kernel", "--workload", "usemem", "--scale", "0.2"])
        .args(["--against", end.against])
        .env("TMPDIR", temporary.path())
        .process_group(0)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let process = child.id();
    // Wait for two of the swap area, cgroup and swap file, so that a change is in progress.
    let mut ended = None;
    wait_until("the lab sets swap up", || {
        ended = child.try_wait().unwrap();
        ended.is_some() || traces(process).len() >= 2
    });
    assert_eq!(ended, None, "the lab failed to start: see its error above");
    let target = process.cast_signed() * if end.group { -1 } else { 1 };
    // SAFETY: kill(2) touches no memory; the target is a child of this test or its process group.
    unsafe { libc::kill(target, end.signal) };
    let status = child.wait().unwrap();
    assert!(!status.success());
    if end.signal != libc::SIGKILL {
        // The lab restores the host before it exits.
        assert_eq!(status.code(), Some(128 + end.signal), "{end:?}");
        assert_eq!(traces(process), Vec::<String>::new(), "{end:?}");
        let left: Vec<_> = fs::read_dir(temporary.path()).unwrap().collect();
        assert!(left.is_empty(), "{end:?}: {left:?}");
    }
    wait_until("the host is restored", || {
        traces(process).is_empty() && (devices(), zswap()) == before
    });
}

#[test]
fn the_host_is_restored_after_the_lab_was_killed_or_interrupted() {
    // SAFETY: the call has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root || !Path::new("/sys/class/zram-control").exists() {
        return skip("root, and zram in the kernel");
    }
    if fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1 {
        return skip("a host without swap");
    }
    for (signal, group) in [
        (libc::SIGKILL, false),
        (libc::SIGTERM, false),
        (libc::SIGINT, true),
    ] {
        let against = "zram:lz4";
        end_the_lab(End {
            signal,
            group,
            against,
        });
    }
    if zswap().is_empty() {
        return skip("zswap in the kernel");
    }
    end_the_lab(End {
        signal: libc::SIGINT,
        group: true,
        against: "zswap",
    });
}

/// After Ctrl-C the exit status is the signal's, not that of a failure, and no file is left.
#[test]
fn an_interrupted_run_without_root_exits_by_the_signal() {
    let temporary = tempfile::tempdir().unwrap();
    let mut child = lab()
        .args(["kernel", "--workload", "usemem", "--scale", "0.5"])
        .args(["--against", "native", "--runs", "1000"])
        .env("TMPDIR", temporary.path())
        .process_group(0)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let files = || fs::read_dir(temporary.path()).unwrap().count();
    wait_until("a run has begun", || files() > 0);
    // SAFETY: kill(2) touches no memory; the target is the process group of a child of this test.
    unsafe { libc::kill(-child.id().cast_signed(), libc::SIGINT) };
    assert_eq!(child.wait().unwrap().code(), Some(128 + libc::SIGINT));
    assert_eq!(files(), 0);
}
