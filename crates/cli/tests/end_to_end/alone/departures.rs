//! Programs that part from their memory in unusual ways, and stay under the limit.

use crate::beside::departures::is_right;
use crate::support::{Limits, MIB, Program, compiled, skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn ends_well(mode: &str, megabytes: &str) {
    is_right(mode, megabytes).assert_limit_held();
}

#[test]
fn children_outlive_a_parent_that_ends_or_executes_right_after_the_fork() {
    alone!(&["cc"]);
    ends_well("left", "32");
}

#[test]
fn a_program_outlives_its_main_thread() {
    alone!(&["cc"]);
    ends_well("main", "40");
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_fork_beside_moves_sees_one_moment() {
    alone!(&["cc"]);
    ends_well("race", "24");
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_fork_beside_moves_that_leave_their_mapping_sees_one_moment() {
    alone!(&["cc"]);
    ends_well("stays", "24");
}

#[test]
fn a_fork_beside_moves_over_what_is_in_use_sees_one_moment() {
    alone!(&["cc"]);
    ends_well("over", "24");
}

#[test]
fn a_tracer_shares_the_limit_of_what_it_traces() {
    alone!(&["cc"]);
    let program = Program::new(compiled("traced", &["traced.c"], &[])).args(["40", "8"]);
    let outcome = program.run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "traced ok\n");
    outcome.assert_swapped(48 * MIB);
    outcome.assert_limit_held();
    // The tracer's pages are not sent out only because the program's cannot be at the moment.
    let out = outcome.number("pages_out") * 4096.0 / MIB as f64;
    assert!(
        out < 4.0 * 48.0,
        "{out} MiB went out, of 48 used three times"
    );
}

/// A control group in which one process is frozen; thawed and removed in the end.
struct Frozen(PathBuf);

impl Frozen {
    /// `None` where there is no freezer.
    fn process(process: i32) -> Option<Frozen> {
        let name = format!("memfold-test-{}", std::process::id());
        let legacy = Path::new("/sys/fs/cgroup/freezer");
        let folder = if legacy.is_dir() {
            legacy.join(name)
        } else {
            Path::new("/sys/fs/cgroup").join(name)
        };
        fs::create_dir(&folder).ok()?;
        let frozen = Frozen(folder);
        fs::write(frozen.0.join("cgroup.procs"), process.to_string()).ok()?;
        frozen.set(true).then_some(frozen)
    }

    fn set(&self, frozen: bool) -> bool {
        let (legacy, unified) = if frozen {
            ("FROZEN", "1")
        } else {
            ("THAWED", "0")
        };
        fs::write(self.0.join("freezer.state"), legacy).is_ok()
            || fs::write(self.0.join("cgroup.freeze"), unified).is_ok()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.set(false);
        let processes = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        for process in processes.lines().filter_map(|line| line.parse().ok()) {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A frozen program looks like one that sleeps: its helper leaves its commands alone.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_frozen_program_does_not_hold_up_the_others() {
    alone!(&["cc", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    // The second grows once the first is frozen, which holds most of what there is by then.
    let script = "\"$0\" 60 0 \"$1\" > /dev/null & echo $!
                  while ! [ -e \"$2\" ]; do sleep 0.05; done; exec \"$0\" 60 0 \"$1\"";
    let sign = folder.path().join("sign");
    let mut running = Program::new("sh")
        .args(["-c", script])
        .arg(compiled("verify", &["verify.c"], &[]))
        .arg(folder.path().join("result"))
        .arg(&sign)
        .start(Limits::Resident(64 * MIB));
    running.wait_for_output(2);
    std::thread::sleep(Duration::from_secs(2));
    let first = String::from_utf8_lossy(&running.output_so_far())
        .lines()
        .next()
        .and_then(|line| line.parse().ok())
        .expect("the first program's number");
    let frozen = Frozen::process(first);
    if frozen.is_some() {
        let (began, before) = (Instant::now(), running.output_so_far().len());
        fs::write(&sign, "").expect("the sign");
        running.wait_for_output(before + 12);
        let took = began.elapsed();
        assert!(took < Duration::from_secs(10), "12 rounds took {took:?}");
    } else {
        skip("a freezer that may be used");
    }
    drop(frozen);
    for process in running.processes() {
        if process != running.root() {
            // Some have ended.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
    let outcome = running.wait();
    assert!(!outcome.text().contains("MISMATCH"), "{}", outcome.text());
}
