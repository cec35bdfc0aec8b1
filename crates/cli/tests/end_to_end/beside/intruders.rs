//! What other users of the host do to the names that a run uses.

use crate::support::{OTHER, STRANGER, Stage, as_user, compiled, memfold, python};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const TOOLS: [&str; 5] = ["cc", "setpriv", "unshare", "setcap", "python3"];

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .concat()
        .escape_ascii()
        .to_string()
}

#[track_caller]
fn assert_success(output: &Output) {
    let status = output.status;
    assert!(status.success(), "{status}: {}", text(output));
}

/// Whether a user can make the folder that a library's path is in, or is in it already.
fn can_make(user: u32, library: &Path) -> bool {
    let folder = library.parent().expect("a folder");
    let status = as_user(user, "mkdir")
        .arg("-p")
        .arg(folder)
        .status()
        .expect("mkdir runs");
    let written = as_user(user, "touch").arg(folder.join("planted")).status();
    status.success() && written.expect("touch runs").success()
}

#[test]
fn leftover_programs_carry_a_path_that_no_other_user_can_make() {
    beside!(&TOOLS);
    let stays = compiled("stays", &["stays.c"], &["-static"]);
    // Long enough to be found unmanaged, and then left; it keeps the output open for so long.
    let output = Command::new(memfold())
        .args([
            "run",
            "--limit",
            "64M",
            "--",
            "sh",
            "-c",
            "\"$0\" 6 & sleep 1.5",
        ])
        .arg(&stays)
        .output()
        .expect("memfold runs");
    assert_success(&output);
    let library = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    assert!(library.is_absolute() && !library.exists(), "{library:?}");
    assert!(!can_make(STRANGER, &library), "{library:?} is anybody's");
}

#[test]
fn no_other_user_can_take_the_name_of_a_killed_run() {
    beside!(&TOOLS);
    let mut running = Command::new(memfold())
        .args(["run", "--limit", "64M", "--"])
        .arg(compiled("stays", &["stays.c"], &["-static"]))
        .arg("20")
        .stdout(Stdio::piped())
        .spawn()
        .expect("memfold runs");
    let mut line = String::new();
    let output = running.stdout.take().expect("its output");
    BufReader::new(output).read_line(&mut line).expect("a line");
    let library = PathBuf::from(line.trim());
    running.kill().expect("it is killed");
    running.wait().expect("it ends");
    assert!(library.exists());
    assert!(!can_make(STRANGER, &library));
    // As a later run sweeps it away.
    std::fs::remove_dir_all(library.parent().expect("a folder")).expect("it is removed");
    assert!(!can_make(STRANGER, &library), "{library:?} is anybody's");
}

#[test]
fn another_users_run_leaves_its_name_taken() {
    beside!(&TOOLS);
    let stage = Stage::new();
    stage.set_capability();
    stage.program(&compiled("stays", &["stays.c"], &["-static"]), "stays");
    // Twice, as the second run finds what the first one left. The folder looks young to cleaners.
    let script = format!(
        "for round in 1 2; do \
           library=$(setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups \
             ./memfold run --limit 64M -- sh -c './stays 5 & sleep 1.5'); \
           test -n \"$library\" || exit 3; \
           setpriv --reuid {OTHER} --clear-groups mkdir -p \"${{library%/*}}\" && exit 4; \
         done; \
         test $(ls -d /tmp/memfold* | wc -l) = 1 || exit 5; \
         test $(stat -c %Y /tmp/memfold*) -gt $(date -d '+5 years' +%s) || exit 6"
    );
    let output = stage.run(&script);
    assert_success(&output);
}

#[test]
fn names_that_others_took_prevent_no_start() {
    beside!(&TOOLS);
    // The folders and the abstract names of all PIDs that come next.
    let squatter = "import os, socket, sys, time\n\
         os.setgid(65534); os.setuid(65534)\n\
         kept = []\n\
         for pid in range(os.getpid(), os.getpid() + 600):\n    \
             for folder in ('/tmp', '/run', '/run/memfold', '/var/lib/memfold'):\n        \
                 path = '%s/memfold-%d' % (folder, pid)\n        \
                 one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n        \
                 one.bind((chr(0) + path + '/control').ljust(108, chr(0)))\n        \
                 kept.append(one)\n        \
                 try: os.mkdir(path)\n        \
                 except OSError: pass\n\
         print('ready', flush=True)\n\
         sys.stdin.read()\n";
    let stage = Stage::new();
    std::fs::write(stage.path("squatter.py"), squatter).expect("a file");
    stage.allow("squatter.py", 0o644);
    let script = format!(
        "mkfifo in out; '{}' squatter.py < in > out & exec 4> in 5< out; read -r line <&5; \
         test \"$line\" = ready || exit 3; ./memfold run --limit 64M -- true",
        python().display()
    );
    let output = stage.run(&script);
    assert_success(&output);
}

#[test]
fn statistics_go_through_no_name_that_another_user_planted() {
    beside!(&TOOLS);
    let stage = Stage::new();
    let shared = stage.folder("shared", 0o1777);
    let secret = stage.path("secret");
    std::fs::write(&secret, "root's").expect("a file");
    let planted = |arguments: &[&str], name: &str| {
        let mut command = as_user(STRANGER, arguments[0]);
        let status = command
            .args(&arguments[1..])
            .arg(shared.join(name))
            .status();
        assert!(status.expect("it runs").success());
    };
    planted(&["ln", "-s", secret.to_str().expect("a path")], "link");
    planted(&["ln", "-s", "/"], "folder");
    planted(&["touch"], "file");
    planted(&["mkfifo"], "pipe");
    let through = format!("folder{}", secret.display());
    for name in ["link", "file", "pipe", through.as_str()] {
        let output = Command::new("timeout")
            .arg("10")
            .arg(memfold())
            .args(["run", "--limit", "64M", "--stats"])
            .arg(shared.join(name))
            .args(["--", "echo", "started"])
            .output()
            .expect("memfold runs");
        assert_eq!(output.status.code(), Some(125), "{name}: {}", text(&output));
        assert!(output.stdout.is_empty(), "{name}: the program was started");
        assert!(text(&output).contains("another user"), "{}", text(&output));
    }
    assert_eq!(
        std::fs::read_to_string(&secret).expect("it is there"),
        "root's"
    );
    std::thread::sleep(Duration::from_millis(1));
}
