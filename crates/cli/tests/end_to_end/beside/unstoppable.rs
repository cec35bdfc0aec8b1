//! `memfold attach` and `memfold detach` of a program whose thread cannot be stopped for a while.

use super::attach::{assert_ended_well, attach, detach, status, text, wait_until};
use crate::support::{children_of_thread, compiled};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// Longer than a try to stop the thread takes.
const ONE_TRY: Duration = Duration::from_millis(400);

/// `unstoppable`, which is killed if it is dropped.
struct Program {
    process: Child,
    input: ChildStdin,
}

impl Program {
    fn start() -> Program {
        let mut process = Command::new(compiled("unstoppable", &["unstoppable.c"], &[]));
        let process = process.stdin(Stdio::piped()).spawn();
        let mut process = process.expect("it starts");
        let input = process.stdin.take().expect("its input");
        Program { process, input }
    }

    fn pid(&self) -> u32 {
        self.process.id()
    }

    fn has_child(&self) -> bool {
        let pid = self.pid().cast_signed();
        !children_of_thread(pid, pid).is_empty()
    }

    fn is_traced(&self) -> bool {
        status(self.pid(), "TracerPid") != 0
    }

    fn has_library(&self) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid()));
        maps.expect("it runs").contains("libmemfold")
    }

    fn go_on(&mut self) {
        self.input.write_all(b".").expect("it reads");
    }

    /// Begins something that is to stop its thread, which waits for a child.
    fn begin_unstoppable<T>(&mut self, begin: impl FnOnce(u32) -> T) -> T {
        self.go_on();
        wait_until("it waits for its child", || self.has_child());
        let begun = begin(self.pid());
        wait_until("it is to be stopped", || self.is_traced());
        begun
    }

    /// The same; the thread can be stopped once one try has failed.
    fn unstoppable_at_first<T>(&mut self, begin: impl FnOnce(u32) -> T) -> T {
        let begun = self.begin_unstoppable(begin);
        std::thread::sleep(ONE_TRY);
        self.go_on();
        begun
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_thread_that_cannot_be_stopped_at_once_is_tried_again() {
    beside!(&["cc"]);
    let mut program = Program::start();
    let mut attach = program.unstoppable_at_first(attach);
    wait_until("it is attached", || {
        assert_eq!(attach.try_wait().expect("a status"), None);
        status(program.pid(), "Threads") == 2
    });
    let detaching = program.unstoppable_at_first(|pid| std::thread::spawn(move || detach(pid)));
    let output = detaching.join().expect("its output");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_ended_well(attach);
    assert!(!program.has_library());
}

/// As a program that the signal kills.
#[test]
fn a_signal_ends_the_tries_to_stop_a_thread() {
    beside!(&["cc"]);
    let mut program = Program::start();
    let attach = program.begin_unstoppable(attach);
    let memfold = Pid::from_raw(attach.id().cast_signed());
    kill(memfold, Signal::SIGTERM).expect("it is there");
    let output = attach.wait_with_output().expect("it ends");
    let errors = text(&output.stderr);
    assert_eq!(
        output.status.signal(),
        Some(Signal::SIGTERM as i32),
        "{errors}"
    );
    assert_eq!(errors, "");
    program.go_on();
    assert!(!program.has_library());
}
