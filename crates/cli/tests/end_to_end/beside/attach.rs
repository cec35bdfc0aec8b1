//! `memfold attach` and `memfold detach`: a program that runs already comes under a limit, and goes its way again.

use crate::support::{
    LEAST_RESIDENT, Limits, Program, Stage, compiled, memfold, rounds, short_or_long, source,
    torture,
};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `verify` at work, which appends to its results what is wrong.
pub(super) struct Verify {
    program: Child,
    results: PathBuf,
    before: Kept,
    _folder: tempfile::TempDir,
}

/// What a program has that memfold must leave as it was: its descriptors, what it does with signals, and its mappings
/// that can be accessed, whose neighbours of the same kind count as one.
#[derive(Debug, PartialEq, Eq)]
struct Kept {
    descriptors: Vec<PathBuf>,
    signals: Vec<String>,
    mappings: Vec<(u64, u64, String)>,
}

impl Kept {
    fn of(pid: u32) -> Kept {
        let of = |file: &str| PathBuf::from(format!("/proc/{pid}/{file}"));
        let descriptors = fs::read_dir(of("fd")).expect("it runs");
        let mut descriptors: Vec<PathBuf> = descriptors
            .map(|entry| fs::read_link(entry.expect("an entry").path()).expect("a descriptor"))
            .collect();
        descriptors.sort();
        let status = fs::read_to_string(of("status")).expect("it runs");
        let signals = status.lines().filter(|line| line.starts_with("Sig"));
        // What waits for it just now is its own.
        let signals =
            signals.filter(|line| !line.starts_with("SigPnd") && !line.starts_with("SigQ"));
        let signals = signals.map(str::to_owned).collect();
        Kept {
            descriptors,
            signals,
            mappings: mappings_of(pid),
        }
    }
}

/// The mappings that can be accessed. What is sealed cannot be unmapped, but has no memory.
pub(super) fn mappings_of(pid: u32) -> Vec<(u64, u64, String)> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it runs");
    let mut mappings: Vec<(u64, u64, String)> = Vec::new();
    // The line of flags is the last one of each mapping.
    for mapping in smaps
        .split_inclusive("\nVmFlags:")
        .zip(smaps.split("\nVmFlags:").skip(1))
    {
        let (text, flags) = mapping;
        let flags = flags.lines().next().unwrap_or_default();
        let head = text.lines().find(|line| is_head(line)).expect("a mapping");
        let (range, rest) = head.split_once(' ').expect("a range");
        let (start, end) = range.split_once('-').expect("a range");
        let [start, end] = [start, end].map(|at| u64::from_str_radix(at, 16).expect("an address"));
        let kind = rest.split_whitespace().collect::<Vec<_>>().join(" ");
        let is_sealed = flags.split_whitespace().any(|flag| flag == "sl");
        // The kernel seals its own.
        if is_sealed && !kind.ends_with(']') {
            let resident = text.lines().find(|line| line.starts_with("Rss:"));
            assert_eq!(
                resident.expect("its memory").split_whitespace().nth(1),
                Some("0")
            );
        } else if !kind.starts_with("---p") {
            match mappings.last_mut() {
                Some((_, last, of)) if *last == start && *of == kind => *last = end,
                _ => mappings.push((start, end, kind)),
            }
        }
    }
    mappings
}

/// Whether a line of `smaps` begins a mapping: the others begin with a name and a colon.
fn is_head(line: &str) -> bool {
    let first = line.split(' ').next().unwrap_or_default();
    first.contains('-') && !first.ends_with(':')
}

impl Verify {
    fn start() -> Verify {
        Verify::of(&compiled("verify", &["verify.c"], &[]))
    }

    /// As another compiler made it.
    pub(super) fn of(program: &Path) -> Verify {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let results = folder.path().join("results");
        let mut program = Command::new(program);
        program.args(["48", "0"]).arg(&results);
        let program = program.stdout(Stdio::null()).spawn().expect("it starts");
        let pid = program.id();
        wait_until("it has its memory", || resident(pid) > 48 << 20);
        Verify {
            program,
            results,
            before: Kept::of(pid),
            _folder: folder,
        }
    }

    fn pid(&self) -> u32 {
        self.program.id()
    }

    fn resident(&self) -> u64 {
        resident(self.pid())
    }

    /// User and system CPU time since it started.
    fn cpu_seconds(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it runs");
        let (_, fields) = stat.rsplit_once(") ").expect("a name");
        let ticks = fields.split(' ').skip(11).take(2);
        let ticks: u32 = ticks
            .map(|ticks| ticks.parse::<u32>().expect("ticks"))
            .sum();
        f64::from(ticks) / rustix::param::clock_ticks_per_second() as f64
    }

    /// Attaches and detaches it so many times; each time it is paged out. Every other time memfold is told to end.
    pub(super) fn assert_attached_and_detached(&mut self, cycles: u32) {
        let pid = self.pid();
        for cycle in 0..cycles {
            let attach = attach(pid);
            wait_until("it is under the limit", || self.resident() < 24 << 20);
            if cycle % 2 == 0 {
                let output = detach(pid);
                assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
                assert_eq!(
                    text(&output.stdout),
                    format!("process {pid} has all its memory back, and runs without memfold\n")
                );
            } else {
                let term = nix::sys::signal::Signal::SIGTERM;
                let memfold = nix::unistd::Pid::from_raw(attach.id().cast_signed());
                nix::sys::signal::kill(memfold, term).expect("it is there");
            }
            assert_ended_well(attach);
            self.assert_free();
        }
    }

    /// It goes on as it would without memfold.
    fn assert_free(&mut self) {
        assert_eq!(self.program.try_wait().expect("a status"), None);
        assert_eq!(status(self.pid(), "Threads"), 1);
        assert!(self.resident() > 48 << 20, "{}", self.resident());
        assert_eq!(Kept::of(self.pid()), self.before);
        let wrong = fs::read_to_string(&self.results).expect("its results");
        assert_eq!(wrong, "");
    }
}

/// A number of `/proc/PID/status`; of memory, in KiB.
pub(super) fn status(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    let status = status.expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let line = line.unwrap_or_else(|| panic!("{field} in {status}"));
    let number = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    number.parse().expect("a number")
}

fn resident(pid: u32) -> u64 {
    status(pid, "VmRSS") << 10
}

impl Drop for Verify {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

pub(super) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn attach(pid: u32) -> Child {
    attach_under("16M", pid)
}

pub(super) fn attach_under(limit: &str, pid: u32) -> Child {
    attach_command(limit, pid).spawn().expect("memfold starts")
}

fn attach_command(limit: &str, pid: u32) -> Command {
    let mut attach = Command::new(memfold());
    attach.args(["attach", &pid.to_string(), "--resident", limit, "-q"]);
    attach.stderr(Stdio::piped());
    attach
}

pub(super) fn detach(pid: u32) -> Output {
    let mut detach = Command::new(memfold());
    let output = detach.args(["detach", &pid.to_string()]).output();
    output.expect("memfold runs")
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// It attached nothing, and says why in one line.
pub(super) fn assert_refused(output: &Output, why: &str) {
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{errors}");
    assert!(
        errors.contains(why) && errors.lines().count() == 1,
        "{errors}"
    );
}

pub(super) fn assert_ended_well(mut attach: Child) {
    wait_until("memfold ends", || {
        attach.try_wait().expect("a status").is_some()
    });
    let output = attach.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_running_program_is_attached_and_detached_again_and_again() {
    beside!(&["cc"]);
    Verify::start().assert_attached_and_detached(4 * rounds());
}

/// Its collector's threads run while one of them is stopped.
#[test]
fn a_python_program_with_threads_forks_while_it_is_held_and_afterwards() {
    beside!(&["python3"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let log = folder.path().join("log");
    let mut program = Command::new(crate::support::python());
    program.arg(source("attached.py")).arg(&log);
    let mut program = program.spawn().expect("it starts");
    let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    wait_until("it works", || lines() > 2);
    for _ in 0..short_or_long(2, if rounds() > 2 { 100 } else { 4 }) {
        let attach = attach_under("20M", program.id());
        let before = lines();
        wait_until("it works under the limit", || lines() > before + 2);
        let output = detach(program.id());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_ended_well(attach);
        let before = lines();
        wait_until("it works without memfold", || lines() > before + 2);
    }
    assert_eq!(program.try_wait().expect("a status"), None);
    program.kill().expect("it is there");
    program.wait().expect("it ends");
    let log = fs::read_to_string(&log).expect("its log");
    assert!(log.lines().all(|line| line == "right"), "{log}");
}

/// A program that checks its own data, with its arguments.
pub(super) fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdout(Stdio::piped());
    command
}

/// Runs a program at least so often, and until it was attached, had pages out and was detached at least so often. What it
/// prints must be right each time.
pub(super) fn assert_cycles(
    (least_runs, least_cycles): (u32, u32),
    words: &[&str],
    limit: &str,
    is_right: impl Fn(&str) -> bool,
) {
    /// memfold may have no CPU for as long as a short run takes.
    const MOST_IN_VAIN: u32 = 10;
    let (mut runs, mut cycles, mut in_vain) = (0, 0, 0);
    while runs < least_runs || cycles < least_cycles {
        let (output, more) = cycles_until_its_end(words, limit);
        assert!(is_right(&output), "{words:?}: {output}");
        runs += 1;
        cycles += more;
        in_vain = if more == 0 { in_vain + 1 } else { 0 };
        assert!(
            in_vain < MOST_IN_VAIN,
            "{words:?} was not detached with pages out"
        );
    }
}

/// Whether a run has paged something out, as far as it answers.
fn has_pages_out(memfold_pid: u32) -> bool {
    is_above_zero(memfold_pid, "pages_out")
}

/// Whether a number of a run's statistics is above zero, as far as it answers.
fn is_above_zero(memfold_pid: u32, name: &str) -> bool {
    let mut stat = Command::new(memfold());
    let stat = stat.args(["stat", "--json", &memfold_pid.to_string()]);
    let output = stat.output().expect("memfold runs");
    let found = serde_json::from_slice::<serde_json::Value>(&output.stdout);
    found.is_ok_and(|found| found[name].as_f64() > Some(0.0))
}

/// Attaches and detaches a program until it ends with success, which has pages out each time. Returns what it printed, and
/// how often that was.
fn cycles_until_its_end(words: &[&str], limit: &str) -> (String, u32) {
    let program = command(words).stderr(Stdio::piped()).spawn();
    let mut program = program.expect("it starts");
    let (mut cycles, mut errors) = (0, String::new());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let statistics = folder.path().join("statistics");
    while program.try_wait().expect("a status").is_none() {
        let mut attach = attach_command(limit, program.id());
        let attach = attach.arg("--stats").arg(&statistics).spawn();
        let mut attach = attach.expect("memfold starts");
        std::thread::sleep(Duration::from_millis(150));
        while attach.try_wait().expect("a status").is_none() && !has_pages_out(attach.id()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut detached = detach(program.id());
        // On a busy machine it may not be attached yet, and would be until it ends.
        while !detached.status.success() && attach.try_wait().expect("a status").is_none() {
            std::thread::sleep(Duration::from_millis(20));
            detached = detach(program.id());
        }
        let attached = attach.wait_with_output().expect("it ends");
        errors = text(&attached.stderr) + &text(&detached.stderr);
        if attached.status.success() && detached.status.success() {
            let found = fs::read(&statistics).expect("statistics");
            let found: serde_json::Value = serde_json::from_slice(&found).expect("JSON");
            assert!(found["pages_out"].as_u64() > Some(0), "{found}");
            // Its parent alone learns it.
            assert!(found["exit_code"].is_null(), "{found}");
            cycles += 1;
            continue;
        }
        // Its memory goes some time before it has a status.
        let began = Instant::now();
        while program.try_wait().expect("a status").is_none() {
            assert!(began.elapsed() < Duration::from_secs(30), "{errors}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let output = program.wait_with_output().expect("it ends");
    assert!(
        output.status.success(),
        "{words:?}: {}, {cycles} times attached\n{}{}{errors}",
        output.status,
        text(&output.stdout),
        text(&output.stderr),
    );
    (text(&output.stdout), cycles)
}

/// Its threads move, drop, map over and fork memory also while all of it is brought back.
#[test]
fn moving_memory_survives_attaching_and_detaching() {
    beside!(&["cc"]);
    let torture = torture().display().to_string();
    let seconds = (3 * rounds()).to_string();
    for disturbances in ["grow,shrink,move,part,dontunmap", "all"] {
        let words = [
            &*torture,
            "--seconds",
            &seconds,
            "--megabytes",
            "48",
            "--disturb",
            disturbances,
        ];
        assert_cycles((1, rounds()), &words, "18M", |_| true);
    }
}

/// Forks beside a detach, when ranges are managed no more whose pages are out still.
#[test]
fn what_forks_wipe_is_empty_in_children_also_while_a_program_is_let_go() {
    only_in_the_long_form!();
    beside!(&["cc"]);
    let wiped = compiled("wiped", &["wiped.c"], &[]).display().to_string();
    let forks = (1000 * rounds()).to_string();
    let words = [&*wiped, "56", &forks, "glance"];
    assert_cycles((1, rounds()), &words, "18M", |_| true);
}

/// Whether its parent has ended, or is let go, before a forked child touches what it inherited.
#[test]
fn a_child_that_nobody_has_seen_yet_has_what_it_inherited() {
    beside!(&["cc"]);
    for is_orphan in [false, true] {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let go = folder.path().join("go");
        let mut program = Command::new(compiled("unseen", &["unseen.c"], &[]));
        program
            .arg("48")
            .arg(&go)
            .args(is_orphan.then_some("orphan"));
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = program.spawn().expect("it starts");
        wait_until("it has its memory", || resident(program.id()) > 48 << 20);
        let attach = attach(program.id());
        wait_until("it is under the limit", || {
            resident(program.id()) < 24 << 20
        });
        fs::write(&go, "").expect("a file");
        let mut said = [0; 7];
        let output = program.stdout.as_mut().expect("a pipe");
        output.read_exact(&mut said).expect("it forks");
        if !is_orphan {
            let output = detach(program.id());
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        }
        drop(program.stdin.take());
        let output = program.wait_with_output().expect("it ends");
        assert_eq!(text(&output.stdout), "right\n", "orphan: {is_orphan}");
        assert_ended_well(attach);
    }
}

/// What its processes forked is let go with it each time, and not held by the next memfold.
#[test]
fn a_tree_of_forks_keeps_every_copy_while_it_is_attached_and_detached() {
    beside!(&["cc"]);
    let tree = compiled("forktree", &["forktree.c"], &[]);
    let tree = tree.display().to_string();
    assert_cycles((2 * rounds(), rounds()), &[&tree, "32"], "16M", |output| {
        output == "forktree ok: 3 levels, 2 orphans\n"
    });
}

#[test]
fn collectors_and_compilers_at_work_are_attached_and_detached_many_times() {
    only_in_the_long_form!();
    beside!(&["java", "node", "python3"]);
    let source = |name: &str| source(name).display().to_string();
    let python = crate::support::python().display().to_string();
    let programs: [(&[&str], &str); 3] = [
        (&["node", &source("heap.js"), "60000"], "60M"),
        (
            &[
                "java",
                "-XX:-UseContainerSupport",
                "-Xmx200m",
                &source("Heap.java"),
                "60000",
            ],
            "100M",
        ),
        (&[&python, &source("objects.py"), "0.6"], "80M"),
    ];
    for (words, limit) in programs {
        let native = command(words).output().expect("it runs");
        assert!(native.status.success());
        let least = if rounds() > 2 { 100 } else { rounds() };
        assert_cycles((1, least), words, limit, |output| {
            output == text(&native.stdout)
        });
    }
}

#[test]
fn memfold_ends_with_the_program_it_is_attached_to() {
    beside!(&["cc"]);
    let mut verify = Verify::start();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let statistics = folder.path().join("statistics");
    let cpu_seconds = || verify.cpu_seconds();
    wait_until("it has computed for a while", || cpu_seconds() > 0.5);
    let before = cpu_seconds();
    let mut attach = attach_command("16M", verify.pid());
    let attach = attach.arg("--stats").arg(&statistics).spawn();
    let attach = attach.expect("memfold starts");
    wait_until("it is under the limit", || verify.resident() < 24 << 20);
    wait_until("it has pages out", || has_pages_out(attach.id()));
    // It is counted in ticks, and may have had none by now.
    wait_until("it has computed", || {
        is_above_zero(attach.id(), "program_cpu_seconds")
    });
    verify.program.kill().expect("it is there");
    // It is gone once it was waited for.
    let most = verify.cpu_seconds() - before;
    verify.program.wait().expect("it ends");
    assert_ended_well(attach);
    let found = fs::read(&statistics).expect("statistics");
    let found: serde_json::Value = serde_json::from_slice(&found).expect("JSON");
    let spent = found["program_cpu_seconds"].as_f64().expect("a number");
    assert!(spent > 0.0 && spent <= most + 0.2, "{spent} of {most}");
}

/// Never zeros in the place of what is gone.
#[test]
fn a_killed_memfold_takes_the_attached_program_with_it() {
    beside!(&["cc"]);
    let mut verify = Verify::start();
    let mut attach = attach(verify.pid());
    wait_until("it is under the limit", || verify.resident() < 24 << 20);
    attach.kill().expect("it is there");
    attach.wait().expect("it ends");
    let status = verify.program.wait().expect("it ends");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(9)
    );
    let wrong = fs::read_to_string(&verify.results).expect("its results");
    assert_eq!(wrong, "");
}

#[test]
fn a_program_of_a_run_is_detached_and_its_children_are_its_own() {
    beside!(&["sh"]);
    let script = "text=x; i=0; while [ $i -lt 22 ]; do text=$text$text; i=$((i+1)); done; echo ready; \
                  read line; i=0; while [ $i -lt 20 ]; do (echo ${#text}) || exit 1; i=$((i+1)); done";
    let mut run = Command::new(memfold());
    run.args(["run", "--resident", "16M", "--", "sh", "-c", script]);
    let run = run.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut run = run.spawn().expect("memfold starts");
    let mut output = std::io::BufReader::new(run.stdout.take().expect("its output"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).expect("a line");
    let shell = crate::support::descendants(run.id().cast_signed())
        .into_iter()
        .find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sh\n")
        })
        .expect("the shell");
    let detached = detach(shell.cast_unsigned());
    assert_eq!(
        detached.status.code(),
        Some(0),
        "{}",
        text(&detached.stderr)
    );
    drop(run.stdin.take());
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut output, &mut rest).expect("its output");
    assert_eq!(rest, "4194304\n".repeat(20));
    assert_eq!(run.wait().expect("it ends").code(), Some(0));
}

/// Each child relies on being known until its helper runs.
#[test]
fn a_program_of_a_run_forks_all_the_time_while_it_is_detached() {
    beside!(&["sh"]);
    let script = "text=x; i=0; while [ $i -lt 22 ]; do text=$text$text; i=$((i+1)); done; \
                  a=$text; b=$text; c=$text; d=$text; echo ready; while [ ! -e \"$0\" ]; do (:) || exit 1; done";
    for round in 0..2 * rounds() {
        for options in [&[][..], &["--prepare-forks"]] {
            let folder = tempfile::tempdir().expect("a temporary directory");
            let stop = folder.path().join("stop");
            let program = Program::new("sh").args(["-c".as_ref(), script.as_ref(), stop.as_path()]);
            let program = program.memfold_options(options.iter().copied());
            let mut running = program.start(Limits::Resident(LEAST_RESIDENT));
            running.wait_for_output(6);
            wait_until("pages were out", || {
                running.statistics()["pages_out"].as_u64() > Some(100)
            });
            std::thread::sleep(Duration::from_millis(100));
            let detached = detach(running.program().cast_unsigned());
            let said = text(&detached.stderr);
            assert_eq!(detached.status.code(), Some(0), "round {round}: {said}");
            std::thread::sleep(Duration::from_millis(200));
            fs::write(&stop, "").expect("a file");
            let outcome = running.wait();
            assert_eq!(outcome.code(), 0, "round {round}, {options:?}: {said}");
        }
    }
}

#[test]
fn what_cannot_be_attached_is_said_in_one_line() {
    beside!(&["cc", "setpriv"]);
    let verify = Verify::start();
    let first = attach(verify.pid());
    wait_until("it is under the limit", || verify.resident() < 24 << 20);
    let again = attach(verify.pid()).wait_with_output().expect("it ends");
    assert_refused(&again, "memfold's library is in it already");
    let itself = attach(first.id()).wait_with_output();
    assert_refused(&itself.expect("it ends"), "it is memfold itself");
    let output = detach(first.id());
    let said = text(&output.stderr);
    assert!(said.contains("is memfold itself"), "{said}");
    let none = attach(i32::MAX as u32).wait_with_output();
    assert_refused(&none.expect("it ends"), "is it the PID of a process?");
    let thread = attach(2).wait_with_output();
    assert_refused(&thread.expect("it ends"), "cannot attach PID 2");
    let stage = Stage::new();
    let own = std::process::id();
    let by_stranger = stage.run_as_stranger(&format!("./memfold attach {own}"));
    assert_refused(&by_stranger, &format!("cannot attach PID {own}"));
    let output = detach(1);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert_eq!(detach(verify.pid()).status.code(), Some(0));
    assert_ended_well(first);
}
