//! Ctrl-Z and `fg`: memfold stops with its program, and not where others need it.
//!
//! The programs that are stopped start no others: one that waits in `vfork` for a stopped child stops for no shell.

use crate::support::{
    Terminal, children_of_thread, descendants, memfold, python, wait_until_stopped,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Long enough for memfold to follow a stop.
const MOMENT: Duration = Duration::from_millis(700);

/// A run in a process group of its own, which ends with this.
struct Job {
    memfold: Child,
}

impl Job {
    /// Returns once its script has printed a line.
    fn start(script: &str) -> Job {
        let mut memfold = Command::new(memfold())
            .args(["run", "--limit", "64M", "--", "sh", "-c", script])
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .expect("memfold starts");
        let mut line = String::new();
        let output = memfold.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        Job { memfold }
    }

    fn id(&self) -> i32 {
        self.memfold.id().cast_signed()
    }

    fn program(&self) -> i32 {
        children_of_thread(self.id(), self.id())[0]
    }

    fn send_to_all(&self, signal: Signal) {
        kill(Pid::from_raw(-self.id()), signal).expect("the group");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in descendants(self.id()) {
            // Some end with others.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
        let _ = self.memfold.wait();
    }
}

fn state(process: i32) -> char {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("a process");
    let (_, fields) = text.rsplit_once(") ").expect("its fields");
    fields.chars().next().expect("its state")
}

fn is_asked(process: i32) -> bool {
    let mut command = Command::new("timeout");
    let output = command
        .arg("10")
        .arg(memfold())
        .arg("stat")
        .arg(process.to_string());
    output.output().expect("memfold starts").status.success()
}

/// Waits until a file grows by some bytes.
fn assert_grows(file: &Path) {
    let length = || std::fs::metadata(file).map_or(0, |file| file.len());
    let before = length();
    let deadline = Instant::now() + Duration::from_secs(10);
    while length() < before + 20 {
        assert!(Instant::now() < deadline, "it stays at {before} bytes");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Part of a script: a program in a session of its own that counts in a file until the folder goes.
fn daemon(folder: &Path) -> String {
    let (until, count) = (folder.join("until"), folder.join("count"));
    std::fs::write(&until, "").expect("a file");
    let (until, count) = (until.display(), count.display());
    let script = format!("while [ -e {until} ]; do echo x >> {count}; sleep 0.02; done");
    format!("setsid sh -c '{script}' > /dev/null &")
}

#[test]
fn memfold_stops_and_runs_with_its_whole_job() {
    beside!(&["sh"]);
    let job = Job::start("echo ready; exec sleep 60");
    for _ in 0..5 {
        job.send_to_all(Signal::SIGTSTP);
        wait_until_stopped(job.id());
        wait_until_stopped(job.program());
        job.send_to_all(Signal::SIGCONT);
        std::thread::sleep(Duration::from_millis(100));
        assert!(is_asked(job.id()));
        assert_ne!(state(job.program()), 'T');
    }
}

#[test]
fn memfold_runs_on_for_what_is_not_stopped() {
    beside!(&["sh", "setsid"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("count");
    let job = Job::start(&format!(
        "{} echo ready; exec sleep 60",
        daemon(folder.path())
    ));
    assert_grows(&file);
    job.send_to_all(Signal::SIGTSTP);
    wait_until_stopped(job.program());
    std::thread::sleep(MOMENT);
    assert_grows(&file);
    assert_eq!(state(job.program()), 'T');
    assert!(is_asked(job.id()));
    job.send_to_all(Signal::SIGCONT);
    std::thread::sleep(MOMENT);
    assert_ne!(state(job.program()), 'T');
    assert_grows(&file);
}

#[test]
fn memfold_runs_on_where_the_program_alone_is_stopped() {
    beside!(&["sh"]);
    let job = Job::start("echo ready; exec sleep 60");
    let program = job.program();
    kill(Pid::from_raw(program), Signal::SIGTSTP).expect("the program");
    wait_until_stopped(program);
    std::thread::sleep(MOMENT);
    assert!(is_asked(job.id()));
    kill(Pid::from_raw(program), Signal::SIGCONT).expect("the program");
    std::thread::sleep(MOMENT);
    assert!(is_asked(job.id()));
    assert_ne!(state(program), 'T');
}

/// Ctrl-Z and `fg` in a terminal, with what the shell shows.
fn assert_stops_at_ctrl_z(script: &str, rounds: u32, while_stopped: impl Fn()) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let (file, program) = (folder.path().join("program"), folder.path().join("script"));
    let count = format!(
        "import time\nwhile True:\n    open('{}', 'a').write('x\\n')\n    time.sleep(0.02)",
        file.display()
    );
    let script = format!("{script} exec {} -c \"{count}\"", python().display());
    std::fs::write(&program, script).expect("a file");
    let terminal = Terminal::start(100, "bash --norc --noprofile");
    terminal.types(&format!(
        "{} run --limit 64M sh {}",
        memfold().display(),
        program.display()
    ));
    terminal.press(&["Enter"]);
    for round in 0..rounds {
        assert_grows(&file);
        terminal.press(&["C-z"]);
        terminal.types(&format!("echo round $(({round} + 100))"));
        terminal.press(&["Enter"]);
        let prompt = format!("\nround {}", round + 100);
        terminal.shows("the shell", |screen| {
            screen.contains(&prompt) && screen.contains("Stopped")
        });
        let length = || std::fs::metadata(&file).expect("a file").len();
        let before = length();
        while_stopped();
        assert_eq!(length(), before, "it runs");
        terminal.types("fg");
        terminal.press(&["Enter"]);
    }
    assert_grows(&file);
    terminal.press(&["C-c"]);
}

#[test]
fn ctrl_z_and_fg_work_again_and_again() {
    beside!(&["bash", "python3", "tmux"]);
    assert_stops_at_ctrl_z("", 10, || ());
}

#[test]
fn ctrl_z_works_beside_a_daemon_which_runs_on() {
    beside!(&["bash", "python3", "setsid", "tmux"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("count");
    assert_stops_at_ctrl_z(&daemon(folder.path()), 3, || {
        assert_grows(&file);
        std::thread::sleep(MOMENT);
        assert_grows(&file);
    });
}
