//! What memfold is started with (ignored signals, limits) is the program's, and memfold gets along
//! with it.

use crate::support::{compiled, memfold, said_but_of_the_kernel};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Starts memfold by a shell that prepares itself for it and executes it by way of what
/// `preparation` ends with.
fn start(preparation: &str, command: &[&str]) -> Child {
    Command::new("sh")
        .args(["-c", &format!("{preparation} \"$0\" run \"$@\"")])
        .arg(memfold())
        .args(command)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sh starts")
}

/// Its end, which must come soon.
fn end_of(mut child: Child) -> Output {
    let deadline = Instant::now() + Duration::from_secs(20);
    while child.try_wait().expect("wait").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("it can be killed");
            child.wait().expect("wait");
            panic!("memfold hung");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn ignored_signals_are_the_programs() {
    beside!(&["sh", "env", "grep"]);
    let status = ["--", "grep", "SigIgn", "/proc/self/status"];
    for name in ["PIPE", "CHLD", "XFSZ", "HUP"] {
        let output = end_of(start(&format!("exec env --ignore-signal={name}"), &status));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let text = text(&output.stdout);
        let mask = text.trim_start_matches("SigIgn:").trim();
        let mask = u64::from_str_radix(mask, 16).expect("a mask");
        let signal: Signal = format!("SIG{name}").parse().expect("a signal");
        // What this test was started with may be ignored besides.
        assert_eq!(mask >> (signal as i32 - 1) & 1, 1, "{name}: {text}");
    }
    let output = end_of(start("exec env --default-signal=PIPE,CHLD,XFSZ", &status));
    let mask = text(&output.stdout);
    let mask = u64::from_str_radix(mask.trim_start_matches("SigIgn:").trim(), 16);
    let changed = [Signal::SIGPIPE, Signal::SIGCHLD, Signal::SIGXFSZ];
    for signal in changed {
        assert_eq!(mask.clone().expect("a mask") >> (signal as i32 - 1) & 1, 0);
    }
}

#[test]
fn a_hang_up_that_is_ignored_does_not_end_what_is_left_behind() {
    beside!(&["sh", "env"]);
    let script = "echo ready; (sleep 1.2; echo done) & exit 0";
    let mut child = start("exec env --ignore-signal=HUP", &["--", "sh", "-c", script]);
    // Until `env` is executed, a hang-up ends the shell.
    let mut ready = [0; 6];
    let output = child.stdout.as_mut().expect("its output");
    output.read_exact(&mut ready).expect("it is ready");
    assert_eq!(&ready, b"ready\n");
    let memfold = Pid::from_raw(child.id().cast_signed());
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(400));
        kill(memfold, Signal::SIGHUP).expect("memfold is there");
    }
    let output = end_of(child);
    assert_eq!(text(&output.stdout), "done\n", "{}", text(&output.stderr));
}

#[test]
fn limits_are_the_programs() {
    beside!(&["sh", "setpriv"]);
    // Also where root may not raise them.
    let bound = |limits: &str| {
        format!("{limits}; exec setpriv --bounding-set -sys_resource --inh-caps -sys_resource")
    };
    let asks = [
        "--limit",
        "64M",
        "--",
        "sh",
        "-c",
        "ulimit -v; ulimit -f; ulimit -St",
    ];
    let limits = "ulimit -v 8000000; ulimit -f 2000; ulimit -St 100";
    for preparation in [format!("{limits}; exec"), bound(limits)] {
        let output = end_of(start(&preparation, &asks));
        let errors = text(&output.stderr);
        assert_eq!(text(&output.stdout), "8000000\n2000\n100\n", "{errors}");
    }
    let file = ["--swap-file", "/tmp", "--swap-size", "1G", "--", "true"];
    let refusals: [(&str, &[&str], &str); 2] = [
        ("ulimit -v 1000000", &["--", "true"], "ulimit -v"),
        ("ulimit -f 2000", &file, "ulimit -f"),
    ];
    for (limits, arguments, remedy) in refusals {
        let output = end_of(start(&bound(limits), arguments));
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{errors}");
        assert_eq!(output.status.signal(), None, "{errors}");
        assert!(
            errors.contains(remedy) && errors.lines().count() == 1,
            "{errors}"
        );
    }
}

/// Where the reader of messages is slow, they wait, and nothing else.
#[test]
fn a_full_pipe_for_messages_holds_nothing_up() {
    beside!(&["cc", "sh", "sleep"]);
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    // 64 KiB unless it is set.
    writer
        .write_all(&vec![b'x'; 1 << 16])
        .expect("room in the pipe");
    // What cannot be held is told of.
    let script = "trap 'echo told; exit 3' TERM; \"$0\" 4 > /dev/null 2>&1 & \
                  echo ready; while :; do sleep 0.05; done 2>&1";
    let stays = compiled("stays", &["stays.c"], &["-static"]);
    let mut child = Command::new(memfold())
        .args(["run", "--limit", "64M", "--", "sh", "-c", script])
        .arg(stays)
        .stdout(Stdio::piped())
        .stderr(writer)
        .spawn()
        .expect("memfold starts");
    std::thread::sleep(Duration::from_millis(2500));
    let memfold = Pid::from_raw(child.id().cast_signed());
    kill(memfold, Signal::SIGTERM).expect("memfold is there");
    let mut output = [0; 11];
    let mut pipe = child.stdout.take().expect("its output");
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(pipe.read_exact(&mut output).map(|()| output)));
    let read = wait.recv_timeout(Duration::from_secs(5));
    let drain = std::thread::spawn(move || {
        let mut errors = Vec::new();
        reader.read_to_end(&mut errors).map(|_| errors)
    });
    assert_eq!(end_of(child).status.code(), Some(3));
    let read = read.expect("the signal came though the messages were not read");
    assert_eq!(text(&read.expect("its output")), "ready\ntold\n");
    let errors = drain.join().expect("a reader").expect("the messages");
    assert!(
        text(&errors).contains("not under the limit"),
        "none is lost"
    );
}

/// As `sudo` keeps it.
#[test]
fn a_runtime_folder_that_is_roots_alone_is_not_used() {
    beside!(&["sh", "setpriv"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let prepare = format!("XDG_RUNTIME_DIR='{}' exec", folder.path().display());
    let command = "setpriv --reuid 65534 --clear-groups true".split(' ');
    let command: Vec<&str> = std::iter::once("--").chain(command).collect();
    let output = end_of(start(&prepare, &command));
    assert!(output.status.success());
    let errors = text(&output.stderr);
    let others = said_but_of_the_kernel(&errors);
    assert!(others.is_empty(), "the library is found: {errors}");
}
