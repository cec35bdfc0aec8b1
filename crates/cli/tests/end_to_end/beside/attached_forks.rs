//! Programs that fork while they are attached: their children are under the limit, too, and are let go with them.

use super::attach::{assert_ended_well, attach_under, detach, mappings_of, text, wait_until};
use crate::support::{compiled, descendants, is_alive};
use nix::sys::signal::Signal;
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What the processes have, in MiB, and how many children there are, each of which has one more.
#[derive(Clone, Copy)]
struct Sizes {
    inherited: u64,
    own: u64,
    children: usize,
}

impl Sizes {
    fn processes(self) -> usize {
        1 + 2 * self.children
    }

    /// Nearly all of it, where each process has a copy of what it inherited.
    fn all(self) -> u64 {
        let children = 2 * self.children as u64;
        (self.inherited + self.own) * children - self.own
    }
}

const SMALL: Sizes = Sizes {
    inherited: 12,
    own: 12,
    children: 3,
};
const LARGE: Sizes = Sizes {
    inherited: 28,
    own: 4,
    children: 2,
};

/// `forkers` at work.
struct Forkers {
    sizes: Sizes,
    program: Child,
    results: PathBuf,
    _folder: tempfile::TempDir,
}

impl Forkers {
    fn start(sizes: Sizes) -> Forkers {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let results = folder.path().join("results");
        let mut program = Command::new(compiled("forkers", &["forkers.c"], &["-pthread"]));
        program
            .args([sizes.inherited, sizes.own, sizes.children as u64].map(|one| one.to_string()));
        program.arg(&results);
        let program = program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut forkers = Forkers {
            sizes,
            program: program.spawn().expect("it starts"),
            results,
            _folder: folder,
        };
        forkers.await_bytes(1);
        forkers
    }

    fn await_bytes(&mut self, count: usize) {
        let output = self.program.stdout.as_mut().expect("its output");
        output.read_exact(&mut vec![0; count]).expect("its output");
    }

    /// Lets it fork, and waits until all of its children and theirs have their memory.
    fn fork(&mut self) {
        let input = self.program.stdin.as_mut().expect("its input");
        input.write_all(b".").expect("it reads");
        self.await_bytes(2 * self.sizes.children);
    }

    fn pid(&self) -> u32 {
        self.program.id()
    }

    /// It and all below it but the one that executed a program.
    fn processes(&self) -> Vec<i32> {
        let mut processes = descendants(self.pid().cast_signed());
        processes.retain(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words.split(|byte| *byte == 0).count() == 6
        });
        processes
    }

    /// Resident anonymous memory of all of them, in MiB.
    fn resident(&self) -> u64 {
        let of = |pid: &i32| status(*pid, "RssAnon");
        self.processes().iter().map(of).sum::<u64>() >> 10
    }

    /// They go on as they would without memfold.
    fn assert_free(&mut self) {
        assert_eq!(self.program.try_wait().expect("a status"), None);
        // The one that executes a program may be about to.
        wait_until("all is back", || self.resident() > self.sizes.all());
        wait_until("all are there", || {
            self.processes().len() == self.sizes.processes()
        });
        for pid in self.processes() {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
            for thread in threads.flatten() {
                let name = fs::read_to_string(thread.path().join("comm")).expect("its name");
                assert_eq!(name, "forkers\n");
            }
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
            assert!(!maps.contains("libmemfold"), "{maps}");
        }
        self.assert_right();
    }

    fn assert_right(&self) {
        let wrong = fs::read_to_string(&self.results).expect("its results");
        assert_eq!(wrong, "");
    }

    /// All verify once more.
    fn end(&mut self) {
        drop(self.program.stdin.take());
        let mut rest = String::new();
        let output = self.program.stdout.as_mut().expect("its output");
        output.read_to_string(&mut rest).expect("its output");
        let status = self.program.wait().expect("it ends");
        assert!(status.success(), "{status}: {rest}");
        self.assert_right();
    }
}

impl Drop for Forkers {
    fn drop(&mut self) {
        for pid in self.processes() {
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
        }
        let _ = self.program.wait();
    }
}

fn status(pid: i32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.map(|line| line.trim_start_matches(':').trim().trim_end_matches(" kB"));
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The limit, and room for what is under way and cannot be paged out (stacks, data of the C library).
const LIMIT: &str = "24M";
const HELD: u64 = 24 + 12;

/// Attached before it forks, and is managed: it is small.
fn attached() -> (Forkers, Child) {
    let forkers = Forkers::start(SMALL);
    let attach = attach_under(LIMIT, forkers.pid());
    let pid = forkers.pid().cast_signed();
    wait_until("it is attached", || status(pid, "Threads") == 2);
    (forkers, attach)
}

fn kill(pid: i32, signal: Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).expect("it is there");
}

#[test]
fn the_children_of_an_attached_program_are_under_its_limit_and_are_let_go_with_it() {
    beside!(&["cc"]);
    let (mut forkers, attach) = attached();
    forkers.fork();
    wait_until("all are under the limit", || forkers.resident() < HELD);
    let output = detach(forkers.pid());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_ended_well(attach);
    forkers.assert_free();
    for pid in forkers.processes() {
        // Looks at what stays mapped.
        mappings_of(pid.cast_unsigned());
    }
    forkers.end();
}

/// Part of what they inherited is out when they are forked.
#[test]
fn children_forked_under_the_limit_are_let_go_when_memfold_is_told_to_end() {
    beside!(&["cc"]);
    let mut forkers = Forkers::start(LARGE);
    let attach = attach_under("16M", forkers.pid());
    wait_until("it is under the limit", || forkers.resident() < 18);
    forkers.fork();
    wait_until("all are under the limit", || forkers.resident() < 16 + 10);
    kill(attach.id().cast_signed(), Signal::SIGTERM);
    assert_ended_well(attach);
    forkers.assert_free();
    forkers.end();
}

#[test]
fn children_that_outlive_an_attached_program_are_let_go_when_memfold_is_told_to_end() {
    beside!(&["cc"]);
    let (mut forkers, attach) = attached();
    forkers.fork();
    wait_until("all are under the limit", || forkers.resident() < HELD);
    let mut children = forkers.processes();
    let root = forkers.pid().cast_signed();
    children.retain(|pid| *pid != root);
    kill(root, Signal::SIGKILL);
    forkers.program.wait().expect("it ends");
    kill(attach.id().cast_signed(), Signal::SIGTERM);
    assert_ended_well(attach);
    for pid in children {
        // All verify at the end of the pipe that the program held, and may have done so.
        let began = Instant::now();
        while is_alive(pid) && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!is_alive(pid), "{pid}");
    }
    forkers.assert_right();
}

/// Never zeros in the place of what is gone.
#[test]
fn a_killed_memfold_takes_the_children_of_the_attached_program_with_it() {
    beside!(&["cc"]);
    let (mut forkers, mut attach) = attached();
    forkers.fork();
    wait_until("all are under the limit", || forkers.resident() < HELD);
    let processes = forkers.processes();
    attach.kill().expect("it is there");
    attach.wait().expect("it ends");
    forkers.program.wait().expect("it ends");
    for pid in processes {
        wait_until("it ends", || !is_alive(pid));
    }
    forkers.assert_right();
}

/// Nothing of the children is known but their address spaces, or not even these.
#[test]
fn a_program_is_detached_right_after_it_forks() {
    beside!(&["cc"]);
    for (sizes, limit) in [(SMALL, LIMIT), (LARGE, "16M")] {
        let mut forkers = Forkers::start(sizes);
        let attach = attach_under(limit, forkers.pid());
        let held = if sizes.inherited > 16 { 18 } else { 64 };
        let pid = forkers.pid().cast_signed();
        wait_until("it is attached", || status(pid, "Threads") == 2);
        wait_until("it is under the limit", || forkers.resident() < held);
        let input = forkers.program.stdin.as_mut().expect("its input");
        input.write_all(b".").expect("it reads");
        let output = detach(forkers.pid());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        forkers.await_bytes(2 * sizes.children);
        // What is not let go by now is when it touches what memfold has of it, which all do.
        assert_ended_well(attach);
        forkers.end();
    }
}
