//! One run of a program: started, watched, timed, ended, and what it left.

use super::judge::{Verdict, judge, most_held, note_excuse};
use super::tree::{Sample, children_of_thread, diagnose, is_alive};
use super::turn::{Share, share_of_this_test};
use super::watcher::Watcher;
use super::{MIB, memfold, patience};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// One sample over the limit, or one warning, may be the host's: it takes CPUs away for less than a heartbeat. What is
/// memfold's is seen again.
const RUNS_AFTER_ONE_OVER: usize = 2;

/// A host that takes a CPU away for longer than this, and for this part of a run, takes the run's meaning: what
/// programs fill meanwhile is not paged out, and a peak is in no sample.
const LONG_PAUSE: Duration = Duration::from_millis(300);
const PART_OF_A_RUN: u32 = 8;
/// So often such a run is repeated.
const RUNS_AFTER_A_PAUSE: usize = 2;

/// How a program is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limits {
    /// Natively, without memfold.
    None,
    /// Under memfold with `--resident` of this many bytes.
    Resident(u64),
    /// Under memfold with `--limit` of this many bytes.
    Total(u64),
}

/// A program and its arguments.
#[derive(Clone)]
pub struct Program {
    command: Vec<OsString>,
    memfold_options: Vec<OsString>,
    timeout: Duration,
    input: Option<PathBuf>,
    changes: Vec<(OsString, OsString)>,
    empty_environment: bool,
}

impl Program {
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            command: vec![program.as_ref().to_owned()],
            memfold_options: Vec::new(),
            timeout: Duration::from_secs(180),
            input: None,
            changes: Vec::new(),
            empty_environment: false,
        }
    }

    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.push(argument.as_ref().to_owned());
        self
    }

    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.command.extend(
            arguments
                .into_iter()
                .map(|argument| argument.as_ref().to_owned()),
        );
        self
    }

    /// Options of `memfold run` besides the limit, where it is run under memfold.
    #[must_use]
    pub fn memfold_options<A: AsRef<OsStr>>(
        mut self,
        options: impl IntoIterator<Item = A>,
    ) -> Self {
        let options = options.into_iter().map(|option| option.as_ref().to_owned());
        self.memfold_options.extend(options);
        self
    }

    /// After how long the run counts as hung.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// A file to be its standard input; otherwise that is empty.
    #[must_use]
    pub fn input(mut self, file: impl Into<PathBuf>) -> Self {
        self.input = Some(file.into());
        self
    }

    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.changes.push((name.into(), value.into()));
        self
    }

    /// Starts from an empty environment.
    #[must_use]
    pub fn empty_environment(mut self) -> Self {
        self.empty_environment = true;
        self
    }

    /// Runs it to its end; again, if the machine held up much of a run in which nothing was wrong. What is wrong in any of
    /// the runs is returned, and where they print different things, the first.
    pub fn run(&self, limits: Limits) -> Outcome {
        let mut outcome = self.run_once(limits);
        for _ in 0..RUNS_AFTER_A_PAUSE {
            if !outcome.was_held_up() || outcome.is_wrong() {
                break;
            }
            let next = self.run_once(limits);
            if !next.is_wrong() && next.output != outcome.output {
                break;
            }
            eprintln!(
                "{}: run again, after a pause of {:?} in {:?}",
                outcome.what, outcome.pause, outcome.took
            );
            outcome = next;
        }
        outcome
    }

    fn run_once(&self, limits: Limits) -> Outcome {
        let mut outcome = self.start(limits).wait();
        outcome.again = Some(self.clone());
        outcome
    }

    /// Starts it and watches it.
    pub fn start(&self, limits: Limits) -> Running {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let stats = folder.path().join("stats.json");
        let mut command = match limits {
            Limits::None => Command::new(&self.command[0]),
            Limits::Resident(bytes) | Limits::Total(bytes) => {
                let mut command = Command::new(memfold());
                let option = if matches!(limits, Limits::Total(_)) {
                    "--limit"
                } else {
                    "--resident"
                };
                command.args(["run", option, &bytes.to_string(), "--stats"]);
                command.arg(&stats).args(&self.memfold_options);
                command.arg("--").arg(&self.command[0]);
                command
            }
        };
        if self.empty_environment {
            command.env_clear();
        }
        let create = |name: &str| File::create(folder.path().join(name)).expect("an output file");
        command
            .args(&self.command[1..])
            .envs(self.changes.iter().map(|(name, value)| (name, value)))
            .stdin(self.input.as_ref().map_or(Stdio::null(), |file| {
                File::open(file).expect("the input file").into()
            }))
            .stdout(create("stdout"))
            .stderr(create("stderr"));
        let ready = Watcher::ready(limits);
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{:?} cannot be started: {error}", self.command));
        let root = child.id().cast_signed();
        Running {
            what: format!("{:?} {limits:?}", self.command),
            limits,
            started: Instant::now(),
            timeout: self.timeout * patience(),
            watcher: ready.watch(root),
            child,
            root,
            folder,
        }
    }
}

/// A run that goes on.
pub struct Running {
    what: String,
    limits: Limits,
    started: Instant,
    timeout: Duration,
    watcher: Watcher,
    child: Child,
    root: i32,
    folder: TempDir,
}

impl Running {
    /// The process that was started: memfold's, or the program's if native.
    pub fn root(&self) -> i32 {
        self.root
    }

    /// What `memfold stat` reports of the run now.
    pub fn statistics(&self) -> serde_json::Value {
        // On busy CPUs a run may not answer in time.
        let mut last = String::new();
        for _ in 0..10 {
            let output = Command::new(memfold())
                .args(["stat", "--json", &self.root.to_string()])
                .output()
                .expect("memfold stat runs");
            if let Ok(statistics) = serde_json::from_slice(&output.stdout) {
                return statistics;
            }
            last = String::from_utf8_lossy(&output.stderr).into_owned();
            thread::sleep(Duration::from_millis(200));
        }
        panic!(
            "{} does not tell its statistics after {:?}: {last}",
            self.what,
            self.started.elapsed()
        );
    }

    /// The program's first process.
    pub fn program(&self) -> i32 {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(&first) = children_of_thread(self.root, self.root).first() {
                return first;
            }
            assert!(
                Instant::now() < deadline,
                "{}: no program was started",
                self.what
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// All processes of the run that are alive.
    pub fn processes(&self) -> Vec<i32> {
        self.watcher.alive()
    }

    /// What it has printed so far.
    pub fn output_so_far(&self) -> Vec<u8> {
        fs::read(self.folder.path().join("stdout")).unwrap_or_default()
    }

    /// Waits until it has printed at least `bytes` bytes.
    pub fn wait_for_output(&mut self, bytes: usize) {
        let deadline = Instant::now() + self.timeout;
        while self.output_so_far().len() < bytes {
            if let Some(status) = self.child.try_wait().expect("wait") {
                panic!("{} ended early: {status}, {}", self.what, self.errors());
            }
            if Instant::now() > deadline {
                self.give_up("printed too little");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until memfold or a program has said this on standard error.
    pub fn wait_for_error(&mut self, said: &str) {
        let deadline = self.started + self.timeout;
        while !self.errors().contains(said) {
            let has_ended = self.has_ended();
            assert!(
                !has_ended || self.errors().contains(said),
                "{} ended and has not said {said}: {}",
                self.what,
                self.errors()
            );
            if Instant::now() > deadline {
                self.give_up("has not said what it should");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }

    fn errors(&self) -> String {
        let text = fs::read(self.folder.path().join("stderr")).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Reports where every thread is, kills them all, and fails the test.
    pub fn give_up(&mut self, why: &str) -> ! {
        let processes = self.watcher.alive();
        let report = diagnose(&processes);
        for process in processes {
            // Some may have ended since.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let _ = self.child.wait();
        panic!(
            "{}: {why} after {:?}\nstdout: {}\nstderr: {}\n{report}",
            self.what,
            self.started.elapsed(),
            tail(&String::from_utf8_lossy(&self.output_so_far())),
            tail(&self.errors())
        );
    }

    /// Has its first program end by a signal, which it may handle, and waits.
    pub fn terminate(self) -> Outcome {
        kill(Pid::from_raw(self.program()), Signal::SIGTERM).expect("it runs");
        self.wait()
    }

    /// Waits for its end, checks that no process outlives it, and returns what it left.
    pub fn wait(mut self) -> Outcome {
        let deadline = self.started + self.timeout;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break status;
            }
            if Instant::now() > deadline {
                self.give_up("hung");
            }
            thread::sleep(Duration::from_millis(2));
        };
        let took = self.started.elapsed();
        let grace = Instant::now() + Duration::from_secs(5);
        while self.watcher.alive().into_iter().any(is_alive) {
            if Instant::now() > grace {
                self.give_up("ended, but left processes behind");
            }
            thread::sleep(Duration::from_millis(5));
        }
        let read = |name: &str| fs::read(self.folder.path().join(name));
        let stats = read("stats.json").ok().map(|text| {
            serde_json::from_slice(&text).unwrap_or_else(|error| {
                panic!("{}: the statistics are not JSON: {error}", self.what)
            })
        });
        let errors = String::from_utf8_lossy(&read("stderr").expect("its errors")).into_owned();
        let (samples, pause) = self.watcher.finish();
        Outcome {
            what: self.what,
            limits: self.limits,
            status,
            output: read("stdout").expect("its output"),
            errors,
            samples,
            took,
            pause,
            stats,
            again: None,
        }
    }
}

/// What a run left.
pub struct Outcome {
    what: String,
    limits: Limits,
    pub status: ExitStatus,
    pub output: Vec<u8>,
    pub errors: String,
    samples: Vec<Sample>,
    /// From its start to its end.
    took: Duration,
    /// The longest time in which the machine let no thread of the tests run.
    pub pause: Duration,
    pub stats: Option<serde_json::Value>,
    /// To run it once more; nothing where the test had a part in the run.
    again: Option<Program>,
}

impl Outcome {
    /// The exit code, as a shell would show it.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().expect("a signal"))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// That it has ended by the signal of [`Running::terminate`].
    #[track_caller]
    pub fn assert_terminated(&self) {
        let expected = 128 + Signal::SIGTERM as i32;
        assert_eq!(self.code(), expected, "{}: {}", self.what, self.errors);
    }

    /// A number of the statistics; its absence fails the test.
    pub fn number(&self, name: &str) -> f64 {
        self.stats
            .as_ref()
            .unwrap_or_else(|| panic!("{} wrote no statistics", self.what))[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{}: the statistics have no number {name}", self.what))
    }

    #[track_caller]
    pub fn assert_success(&self) {
        assert!(
            self.status.success(),
            "{} ended with {}\nstdout: {}\nstderr: {}",
            self.what,
            self.status,
            tail(&self.text()),
            tail(&self.errors)
        );
        assert!(!self.has_missed_a_page(), "{}: {}", self.what, self.errors);
    }

    /// Whether memfold noticed that a page was not where it should have been.
    pub fn has_missed_a_page(&self) -> bool {
        self.errors.contains("now reads as zeros")
    }

    /// Whether the machine let no thread run for a large part of it.
    fn was_held_up(&self) -> bool {
        self.pause > LONG_PAUSE && self.pause > self.took / PART_OF_A_RUN
    }

    /// Whether it shows a failure, which no other run may hide.
    fn is_wrong(&self) -> bool {
        let failures = [
            "processes_unmanaged",
            "file_errors",
            "remote_failures",
            "remote_lost_pages",
        ];
        let mut counts = failures.into_iter().filter_map(|name| {
            let statistics = self.stats.as_ref()?;
            statistics[name].as_u64()
        });
        !self.status.success() || self.has_missed_a_page() || counts.any(|count| count > 0)
    }

    /// The sample in which programs and memfold held most.
    pub fn peak(&self) -> Sample {
        most_held(&self.samples, 0, |sample| sample.total)
    }

    /// That the program's memory really was out: otherwise the run shows nothing.
    #[track_caller]
    pub fn assert_swapped(&self, natural_peak: u64) {
        let (Limits::Resident(limit) | Limits::Total(limit)) = self.limits else {
            return;
        };
        let out = self.number("pages_out") * 4096.0;
        let least = natural_peak.saturating_sub(limit) as f64 * 0.5;
        assert!(
            out >= least && self.number("pages_in") > 0.0,
            "{}: only {out} bytes were paged out and {} pages in, of {natural_peak} bytes under a limit of {limit}",
            self.what,
            self.number("pages_in")
        );
    }

    /// That what was sampled stayed within the limit, plus 5 % and 8 MiB. Where the machine let no
    /// thread run for a while, as the tests' own heartbeat shows, what a program touches meanwhile
    /// comes on top, but not for long, no more than the limit once again, and in few runs. A run that
    /// is over the limit without such a pause is repeated: the next two must hold it.
    #[track_caller]
    pub fn assert_limit_held(&self) {
        self.assert_held_within(|limit| limit + limit / 20 + 8 * MIB);
    }

    /// [`Outcome::assert_limit_held`] for many processes that come to the limit only by writing to
    /// what forks share. Until they are managed, the kernel copies such pages without an event
    /// (`docs/design.md`, known limits): this only keeps it from growing.
    #[track_caller]
    pub fn assert_limit_held_but_for_copies(&self) {
        self.assert_held_within(|limit| limit * 7 / 4 + 8 * MIB);
    }

    #[track_caller]
    fn assert_held_within(&self, allowed: fn(u64) -> u64) {
        assert_eq!(
            share_of_this_test(),
            Share::Alone,
            "a limit is judged beside other tests"
        );
        let Err(why) = self.held_within(allowed) else {
            return;
        };
        let Some(program) = &self.again else {
            panic!("{why}");
        };
        eprintln!("runs twice more, since {why}");
        for _ in 0..RUNS_AFTER_ONE_OVER {
            let next = program.run(self.limits);
            next.assert_success();
            if let Err(again) = next.held_within(allowed) {
                panic!("{why}; and again, {again}");
            }
        }
    }

    /// That no warning says that the limit is exceeded. One comes once it is for a twentieth of a second, which the
    /// machine may take: the run is repeated then, and one of the next two must have none.
    #[track_caller]
    pub fn assert_no_warning_of_the_limit(&self) {
        const WARNING: &str = "the limit is exceeded";
        if !self.errors.contains(WARNING) {
            return;
        }
        let program = self.again.as_ref().expect("a run that can be repeated");
        eprintln!("{}: run again, since {}", self.what, tail(&self.errors));
        let is_silent = |_| {
            let next = program.run(self.limits);
            next.assert_success();
            !next.errors.contains(WARNING)
        };
        let any_is_silent = (0..RUNS_AFTER_ONE_OVER).any(is_silent);
        assert!(any_is_silent, "each time: {}", self.errors);
    }

    /// Whether the limit was held; otherwise what was seen.
    #[track_caller]
    fn held_within(&self, allowed: fn(u64) -> u64) -> Result<(), String> {
        type Size = fn(&Sample) -> u64;
        let (limit, size): (u64, Size) = match self.limits {
            Limits::None => return Ok(()),
            Limits::Resident(limit) => (limit, |sample| sample.programs),
            Limits::Total(limit) => (limit, |sample| sample.total),
        };
        match judge(&self.samples, size, limit, allowed(limit), self.pause) {
            Verdict::Held => Ok(()),
            Verdict::Excused { over } => {
                let over = over / 1024;
                note_excuse(&format!(
                    "{}: {over} KiB more, with a pause of {:?}",
                    self.what, self.pause
                ));
                Ok(())
            }
            Verdict::Outgrown { held, samples } => Err(format!(
                "{}: {} KiB in programs and {} KiB in memfold in {samples} samples under a limit of {} KiB; pause {:?}, statistics {:?}",
                self.what,
                held.programs / 1024,
                held.supervisor / 1024,
                limit / 1024,
                self.pause,
                self.stats
            )),
        }
    }
}

/// The end of a long text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(30)..].join("\n");
    let skipped = tail.chars().count().saturating_sub(4000);
    tail.chars().skip(skipped).collect()
}
