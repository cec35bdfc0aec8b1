//! `memfold top` in a real terminal, of several widths.

use crate::support::memfold;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A terminal of its own server, which goes with this.
struct Terminal {
    server: String,
}

impl Terminal {
    fn start(width: u32, command: &str) -> Terminal {
        let server = format!("memfold-{}-{width}", std::process::id());
        let terminal = Terminal { server };
        let width = width.to_string();
        let size = ["-x", width.as_str(), "-y", "30"];
        terminal.tmux(
            &[
                &["-f", "/dev/null", "new-session", "-d"],
                &size[..],
                &[command],
            ]
            .concat(),
        );
        terminal
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-u", "-L", &self.server])
            .args(arguments)
            .output()
            .expect("tmux runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Waits until the screen is as expected.
    fn shows(&self, what: &str, expected: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if expected(&screen) {
                return screen;
            }
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{what}:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn it_fits_every_terminal_and_its_keys_work() {
    beside!(&["tmux", "cat", "sh"]);
    let run = Command::new(memfold())
        .args(["run", "--limit", "64M", "--", "/bin/sh", "-c", "cat; :"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    let mut run = run.expect("memfold starts");
    let pid = run.id().to_string();
    for width in [30, 60, 100, 200] {
        let terminal = Terminal::start(
            width,
            &format!("{} top {pid}; sleep 60", memfold().display()),
        );
        let screen = terminal.shows("the run", |screen| screen.contains("64.0 MiB"));
        let lines: Vec<&str> = screen.lines().collect();
        assert!(
            lines[0].contains("PID") && lines[0].contains("COMMAND"),
            "{screen}"
        );
        assert!(
            lines[1].contains(&pid) && lines[1].contains("sh -c cat"),
            "{screen}"
        );
        assert!(!lines[1].contains("/bin"), "{screen}");
        assert_eq!(lines[0].contains("PROGRAMS"), width >= 100, "{screen}");
        terminal.tmux(&["send-keys", "?"]);
        terminal.shows("the help", |screen| screen.contains("q, Esc  quit"));
        terminal.tmux(&["send-keys", "x"]);
        terminal.shows("no help", |screen| !screen.contains("q, Esc  quit"));
        terminal.tmux(&["send-keys", "p"]);
        terminal.shows("the programs", |screen| screen.contains("RESIDENT"));
        terminal.tmux(&["send-keys", "p", "s"]);
        terminal.shows("the order", |screen| screen.contains("HELD▾"));
        terminal.tmux(&["send-keys", "q"]);
        terminal.shows("the end", |screen| !screen.contains("quits"));
    }
    drop(run.stdin.take());
    assert!(run.wait().expect("it ends").success());
}

/// Other tests' runs are not seen by another user.
#[test]
fn without_a_run_it_waits_for_one() {
    beside!(&["tmux", "setpriv"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let copy = folder.path().join("memfold");
    crate::support::copy_program(memfold(), &copy);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).expect("its mode");
    let command = format!(
        "setpriv --reuid 54321 --regid 54321 --clear-groups env -u XDG_RUNTIME_DIR {} top; sleep 60",
        copy.display()
    );
    let terminal = Terminal::start(40, &command);
    terminal.shows("that it waits", |screen| {
        screen.contains("Nothing runs under memfold")
    });
    std::thread::sleep(Duration::from_millis(1500));
    terminal.shows("that it still waits", |screen| screen.contains("Waiting"));
    terminal.tmux(&["send-keys", "q"]);
    terminal.shows("the end", |screen| !screen.contains("quits"));
}
