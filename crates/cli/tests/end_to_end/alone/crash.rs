//! What a run leaves behind when its program is killed: nothing.

use crate::beside::crash::{send, verifier};
use crate::support::{Limits, MIB};
use nix::sys::signal::Signal;
use std::fs;
use std::path::PathBuf;

/// Folders that a run might have left in the temporary and runtime directories.
fn traces() -> Vec<PathBuf> {
    let runs = fs::read_dir("/run/memfold").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = runs.map(|entry| entry.path()).collect();
    for folder in [std::env::temp_dir(), "/dev/shm".into(), "/run".into()] {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with("memfold-") {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_programs_death_ends_memfold_and_leaves_nothing() {
    alone!(&["cc"]);
    let before = traces();
    let folder = tempfile::tempdir().expect("a temporary directory");
    for signal in [Signal::SIGKILL, Signal::SIGSEGV, Signal::SIGTERM] {
        let file = folder.path().join("result");
        let mut running = verifier(&file).start(Limits::Resident(16 * MIB));
        running.wait_for_output(2);
        let program = running.program();
        send(signal, program);
        // `wait` also fails when a process is left behind.
        let outcome = running.wait();
        assert_eq!(outcome.code(), 128 + signal as i32, "{}", outcome.errors);
        assert_eq!(fs::read_to_string(&file).expect("the result file"), "");
    }
    // Of runs that were killed before, what is old enough is removed by these.
    let left: Vec<PathBuf> = traces()
        .into_iter()
        .filter(|path| !before.contains(path))
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}
