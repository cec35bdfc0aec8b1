//! The tests' own instruments: programs that verify memory must notice a wrong byte,
//! and the sampler must see memory.

use crate::support::{
    Limits, MIB, Program, alone, available, compiled, descendants, wait_until_stopped,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};

/// Start of the largest private anonymous mapping of a process, and its length.
fn largest_mapping(process: i32) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("its mappings");
    maps.lines()
        .filter(|line| line.contains(" rw-p ") && line.split_whitespace().count() == 5)
        .filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            Some((start, u64::from_str_radix(end, 16).ok()? - start))
        })
        .max_by_key(|&(_, length)| length)
        .expect("an anonymous mapping")
}

#[test]
fn a_verifying_program_notices_one_wrong_byte() {
    if !available("one wrong byte", &["cc"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    let program = Program::new(compiled("verify", &["verify.c"], &[]))
        .args(["8", "0"])
        .arg(&result);
    let mut running = program.start(Limits::None);
    running.wait_for_output(1);
    let (start, length) = largest_mapping(running.root());
    assert!(length >= 8 * MIB);
    let mut memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", running.root()))
        .expect("its memory");
    // It ends at the first wrong byte that it finds.
    let stopped = Pid::from_raw(running.root());
    kill(stopped, Signal::SIGSTOP).expect("it is stopped");
    wait_until_stopped(running.root());
    // A few bytes, because a page may just be about to be rewritten.
    for page in [100, 700, 1300, 1900] {
        let mut byte = [0];
        let place = SeekFrom::Start(start + page * 4096 + 1234);
        memory.seek(place).expect("seek");
        memory.read_exact(&mut byte).expect("read");
        memory.seek(place).expect("seek");
        memory.write_all(&[byte[0] ^ 0x10]).expect("write");
    }
    kill(stopped, Signal::SIGCONT).expect("it goes on");
    let outcome = running.wait();
    assert_eq!(outcome.code(), 1, "{}", outcome.text());
    assert!(outcome.text().contains("MISMATCH"), "{}", outcome.text());
    assert_eq!(
        fs::read_to_string(&result).expect("the result file"),
        "MISMATCH\n"
    );
}

#[test]
fn the_sampler_sees_the_memory_of_a_tree_once() {
    if !available("sampler", &["cc"]) {
        return;
    }
    let _guard = alone();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let verify = compiled("verify", &["verify.c"], &[]);
    let outcome = Program::new(verify)
        .args(["64", "30"])
        .arg(folder.path().join("result"))
        .run(Limits::None);
    outcome.assert_success();
    let seen = outcome.peak().total;
    assert!((64 * MIB..70 * MIB).contains(&seen), "{seen} of 64 MiB");
    // Forks that share memory: far less than processes times memory.
    let outcome = Program::new(compiled("forktree", &["forktree.c"], &[]))
        .arg("40")
        .run(Limits::None);
    outcome.assert_success();
    let seen = outcome.peak().total;
    assert!(
        (40 * MIB..40 * 8 * MIB).contains(&seen),
        "{seen} in a tree that shares 40 MiB"
    );
    assert!(
        descendants(1).len() > 1,
        "every process descends from the first"
    );
}
