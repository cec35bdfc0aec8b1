//! `memfold-lab soak` end to end: memfold does not grow, and no process outlives the lab.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use memfold_testing::skip;

use crate::{lab, memfold_is_built};

/// Default length of the run in minutes, overridden by `MEMFOLD_SOAK_MINUTES`: long enough for
/// every program to replace all its data several times.
const MINUTES: &str = "1";

/// Growth allowed from the first to the last sample, for noise: a share of the initial value plus a
/// constant.
const ALLOWED: [(&str, f64, f64); 7] = [
    ("descriptors", 0.0, 3.0),
    // A program that never pauses has one of its own for a while.
    ("threads", 0.0, 3.0),
    ("mappings", 0.0, 5.0),
    // The allocator keeps freed memory, and records of COW-shared pages vary.
    ("heap_bytes", 0.0, 3e6),
    // The programs' heaps reach their full address range only after some minutes.
    ("table_bytes", 0.0, 6e6),
    // Varies with what is resident at the time, and with how fast the programs replace their data.
    ("pool_bytes", 1.0, 0.0),
    // What the allocator wastes, a share of what is stored.
    ("unowned_pool_bytes", 0.5, 4e6),
];

/// Mappings that a thread brings, and that are not counted twice: its stack, its signal stack and
/// its arena of the C library's allocator, each with a part without access.
const MAPPINGS_OF_A_THREAD: f64 = 6.0;

/// Serialises the tests: each loads the machine.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn memfold_does_not_grow() {
    if !memfold_is_built() {
        return;
    }
    let _alone = alone();
    let minutes = std::env::var("MEMFOLD_SOAK_MINUTES").unwrap_or(MINUTES.to_owned());
    let output = lab()
        .args(["soak", "--json", "--minutes", &minutes])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let notes = report["notes"].as_array().expect("notes").iter();
    for note in notes.map(|note| note.as_str().expect("a text")) {
        // Rests that did not settle are told, too.
        if note.contains("is left out") {
            skip(note);
        }
    }
    let hours = minutes.parse::<f64>().unwrap() / 60.0;
    let names = ["figure", "at_start", "at_end", "slope_per_hour"];
    let rows = crate::schema::rows(&output, "soak", &names);
    let number = |figure: &str, name: &str| {
        let row = rows.iter().find(|row| row["figure"] == figure);
        let row = row.unwrap_or_else(|| panic!("no {figure}"));
        row[name].as_f64().expect("a number")
    };
    let growth = |figure: &str| number(figure, "slope_per_hour") * hours;
    let by_threads = growth("threads").max(0.0) * MAPPINGS_OF_A_THREAD;
    let mut grown = Vec::new();
    for (figure, share, constant) in ALLOWED {
        let counted = if figure == "mappings" {
            by_threads
        } else {
            0.0
        };
        let growth = growth(figure) - counted;
        if growth > number(figure, "at_start") * share + constant {
            grown.push(format!("{figure} by {growth:.0}"));
        }
    }
    assert!(grown.is_empty(), "{grown:?}\n{error}\n{rows:#?}");
}

/// Command lines of the processes whose TMPDIR is `folder`: the lab and all that it started.
fn processes(folder: &Path) -> Vec<String> {
    let wanted = format!("TMPDIR={}", folder.display());
    let all = fs::read_dir("/proc").unwrap().flatten();
    let has_folder = |process: &PathBuf| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|line| line == wanted.as_bytes())
    };
    let ours = all.map(|entry| entry.path()).filter(has_folder);
    ours.map(|process| fs::read_to_string(process.join("cmdline")).unwrap_or_default())
        .collect()
}

fn wait_until(what: &str, folder: &Path, condition: impl Fn(&[String]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = processes(folder);
        if condition(&found) {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "not in a minute: {what}: {found:?}"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn no_program_outlives_the_lab() {
    if !memfold_is_built() {
        return;
    }
    let _alone = alone();
    for (signal, group) in [
        (libc::SIGKILL, false),
        (libc::SIGTERM, false),
        (libc::SIGINT, true),
    ] {
        let temporary = tempfile::tempdir().unwrap();
        let mut child = lab()
            .args(["soak", "--minutes", "1"])
            .env("TMPDIR", temporary.path())
            .process_group(0)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The lab, memfold, the parent of the programs, and some programs.
        wait_until("the programs start", temporary.path(), |found| {
            found.len() > 5
        });
        let target = child.id().cast_signed() * if group { -1 } else { 1 };
        // SAFETY: kill(2) touches no memory; the target is a child of this test or its process
        // group.
        unsafe { libc::kill(target, signal) };
        let status = child.wait().unwrap();
        wait_until(
            "all processes have exited",
            temporary.path(),
            <[String]>::is_empty,
        );
        if signal != libc::SIGKILL {
            assert_eq!(status.code(), Some(128 + signal));
            let left: Vec<_> = fs::read_dir(temporary.path()).unwrap().collect();
            assert!(left.is_empty(), "signal {signal}: {left:?}");
        }
    }
}
