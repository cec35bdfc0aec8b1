//! A server under test, and the programs that talk to it.

use memfold_testing::skip;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

pub const MEMFOLD: &str = env!("CARGO_BIN_EXE_memfold");
pub const MIB: usize = 1 << 20;

/// A server, and the folder with its socket.
pub struct Served {
    child: Child,
    pub folder: tempfile::TempDir,
}

impl Served {
    pub fn start(options: &[&str]) -> Served {
        Self::start_by(Command::new(MEMFOLD), options)
    }

    /// Starts it by a command that runs memfold.
    pub fn start_by(mut command: Command, options: &[&str]) -> Served {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("disk.sock");
        let stats = folder.path().join("stats.json");
        let child = command
            .arg("serve")
            .arg(format!("--nbd=unix:{}", socket.display()))
            .arg("--stats")
            .arg(stats)
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .expect("memfold starts");
        let served = Served { child, folder };
        let began = Instant::now();
        while UnixStream::connect(served.socket()).is_err() {
            assert!(began.elapsed() < Duration::from_secs(20), "it listens");
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// What `memfold stat --json` says of it.
    pub fn stat(&self) -> serde_json::Value {
        let output = run(MEMFOLD, &["stat", "--json", &self.pid()]);
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("it runs");
    }

    /// Waits, once it was sent the first signal, until the next one ends it at once.
    pub fn wait_until_next_signal_ends_it(&self) {
        let tasks = format!("/proc/{}/task", self.pid());
        let of_thread = |thread: &std::path::Path| {
            let name = std::fs::read_to_string(thread.join("comm")).ok()?;
            let status = std::fs::read_to_string(thread.join("status")).ok()?;
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigBlk:"))?;
            let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
            let terminates = 1 << (nix::sys::signal::Signal::SIGTERM as i32 - 1);
            Some(name == "signals\n" && mask & terminates == 0)
        };
        let began = Instant::now();
        loop {
            let mut threads = std::fs::read_dir(&tasks).expect("it runs").flatten();
            if threads.any(|thread| of_thread(&thread.path()) == Some(true)) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "it takes none");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it ends")
    }

    /// Waits for its end; the signal that it died of.
    pub fn wait_for_signal(&mut self) -> Option<i32> {
        self.wait().signal()
    }

    /// Ends it by a signal; its statistics and what it said.
    pub fn end(mut self, signal: nix::sys::signal::Signal) -> (serde_json::Value, String) {
        self.signal(signal);
        // Before it is waited for: it does not end before all that it says fits into the pipe.
        let mut said = String::new();
        let errors = self.child.stderr.take().expect("a pipe");
        { errors }.read_to_string(&mut said).expect("text");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}: {said}");
        assert!(!self.socket().exists(), "the socket is left");
        let stats = std::fs::read_to_string(self.folder.path().join("stats.json"));
        let stats = serde_json::from_str(&stats.expect("statistics")).expect("JSON");
        (stats, said)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn has(tools: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |tool: &str| std::env::split_paths(&path).any(|folder| folder.join(tool).exists());
    match tools.iter().find(|tool| !found(tool)) {
        Some(tool) => {
            skip(tool);
            false
        }
        None => true,
    }
}

pub fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    let output = output.expect("the client runs");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    output
}

/// memfold's exit status and what it printed.
pub fn memfold(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(MEMFOLD).args(arguments).output();
    let output = output.expect("memfold runs");
    let mut text = String::from_utf8(output.stdout).expect("text");
    text += &String::from_utf8(output.stderr).expect("text");
    (output.status.code().expect("an exit"), text)
}
