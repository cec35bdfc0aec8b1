//! `memfold top` in a real terminal, of several widths.

use crate::support::{MIB, Terminal, memfold, python};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
    // It can be asked a moment after it has started.
    let began = Instant::now();
    let can_be_asked = || {
        let output = Command::new(memfold()).args(["stat", &pid]).output();
        output.expect("memfold starts").status.success()
    };
    while !can_be_asked() {
        assert!(began.elapsed() < Duration::from_secs(20), "{pid}");
        std::thread::sleep(Duration::from_millis(10));
    }
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
        terminal.press(&["?"]);
        terminal.shows("the help", |screen| screen.contains("q, Esc  quit"));
        terminal.press(&["x"]);
        terminal.shows("no help", |screen| !screen.contains("q, Esc  quit"));
        terminal.press(&["p"]);
        terminal.shows("the programs", |screen| screen.contains("RESIDENT"));
        terminal.press(&["p", "s"]);
        terminal.shows("the order", |screen| screen.contains("USED▾"));
        terminal.press(&["q"]);
        terminal.shows("the end", |screen| !screen.contains("quits"));
    }
    drop(run.stdin.take());
    assert!(run.wait().expect("it ends").success());
}

/// 90 MiB that compress, touched twice.
const TOUCHED: &str = "\
import sys
b = bytearray(90 << 20)
for round in range(2):
    for at in range(0, len(b), 4096):
        b[at:at + 8] = at.to_bytes(8, 'little')
print('touched', flush=True)
sys.stdin.read()
";

/// Counts of MiB in a line, in order.
fn mebibytes(line: &str) -> Vec<f64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.windows(2).filter(|pair| pair[1] == "MiB");
    pairs.filter_map(|pair| pair[0].parse().ok()).collect()
}

/// Types a new limit, as it is seen to be asked for.
fn type_limit(terminal: &Terminal, megabytes: u64) {
    terminal.press(&["l"]);
    terminal.shows("that a limit is asked for", |screen| {
        words(screen).contains(": _")
    });
    terminal.types(&format!("{megabytes}M"));
    let typed = format!(": {megabytes}M_");
    terminal.shows("what was typed", |screen| words(screen).contains(&typed));
}

/// The screen's words, wherever its lines end.
fn words(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn it_shows_a_programs_mappings_and_changes_limits_at_every_width() {
    beside!(&["tmux", "python3"]);
    let mut run = Command::new(memfold())
        .args(["run", "--limit", "64M", "--summary", "never", "--"])
        .arg(python())
        .args(["-c", TOUCHED])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("memfold starts");
    let mut line = String::new();
    let output = run.stdout.as_mut().expect("a pipe");
    BufReader::new(output).read_line(&mut line).expect("a line");
    assert_eq!(line, "touched\n");
    let pid = run.id().to_string();
    let limit = || {
        let output = Command::new(memfold())
            .args(["stat", "--json", &pid])
            .output();
        let text = output.expect("memfold starts").stdout;
        let stats: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        stats["limit_bytes"].as_u64().expect("a number") / MIB
    };
    let mut before = 64;
    for (width, new) in [(30, 70), (60, 48), (100, 96), (200, 64)] {
        let terminal = Terminal::start(
            width,
            &format!("{} top {pid}; sleep 60", memfold().display()),
        );
        terminal.shows("the run", |screen| screen.contains("MiB"));
        let screen = terminal.shows_at("m", "the mappings", |screen| {
            screen.contains("RATIO") && screen.contains(":1")
        });
        assert!(screen.contains("PID"), "{screen}");
        assert_eq!(screen.contains("MAPPING"), width >= 60, "{screen}");
        assert_eq!(screen.contains("ADDRESS"), width >= 60, "{screen}");
        let row = screen
            .lines()
            .skip_while(|line| !line.contains("RATIO"))
            .nth(1);
        let sizes = mebibytes(row.expect("a mapping"));
        // With the size in front where there is room: all of the array is in memory or out.
        let (resident, out) = (sizes[sizes.len() - 2], sizes[sizes.len() - 1]);
        assert!((85.0..110.0).contains(&(resident + out)), "{screen}");
        assert!(out > 5.0, "{screen}");
        terminal.press(&["m"]);
        terminal.shows("the statistics", |screen| !screen.contains("RATIO"));
        type_limit(&terminal, new);
        terminal.press(&["Enter"]);
        terminal.shows("the question", |screen| screen.contains("y/n"));
        terminal.press(&["n"]);
        terminal.shows("that it is as before", |screen| {
            screen.contains("no limit is changed")
        });
        assert_eq!(limit(), before);
        type_limit(&terminal, new);
        terminal.press(&["Enter", "y"]);
        let done = format!("limit of run {pid}: {before}.0 MiB -> {new}.0 MiB; in use: ");
        terminal.shows("what that did", |screen| words(screen).contains(&done));
        assert_eq!(limit(), new);
        before = new;
        terminal.press(&["q"]);
        terminal.shows("the end", |screen| !screen.contains("q quits"));
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
    terminal.press(&["q"]);
    terminal.shows("the end", |screen| !screen.contains("quits"));
}

/// What `stty -g` has printed.
fn modes(screen: &str) -> Vec<&str> {
    let are_modes = |line: &&str| line.matches(':').count() > 10;
    screen.lines().filter(are_modes).collect()
}

#[test]
fn the_terminal_is_restored_where_it_is_killed() {
    beside!(&["tmux", "sh", "stty"]);
    for (name, status) in [("TERM", 143), ("HUP", 129), ("QUIT", 131)] {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("pid");
        let command = format!(
            "stty -g; sh -c 'echo $$ > {}; exec {} top'; echo status $?; stty -g; sleep 60",
            file.display(),
            memfold().display()
        );
        let terminal = Terminal::start(160, &command);
        terminal.shows("the keys", |screen| screen.contains("q quits"));
        let pid = std::fs::read_to_string(&file).expect("its PID");
        let killed = Command::new("kill")
            .args(["-s", name, pid.trim()])
            .status()
            .expect("kill starts");
        assert!(killed.success());
        let ended = format!("status {status}");
        let screen = terminal.shows("the end", |screen| {
            screen.contains(&ended) && modes(screen).len() == 2
        });
        let modes = modes(&screen);
        assert_eq!(modes[0], modes[1], "{screen}");
        let cursor = terminal.tmux(&["display-message", "-p", "#{cursor_flag}"]);
        assert_eq!(cursor.trim(), "1", "the cursor is shown");
    }
}

#[test]
fn it_stops_at_ctrl_z_and_is_drawn_again() {
    beside!(&["tmux", "bash"]);
    let terminal = Terminal::start(100, "bash --norc --noprofile");
    terminal.types(&format!("{} top", memfold().display()));
    terminal.press(&["Enter"]);
    terminal.shows("the keys", |screen| screen.contains("q quits"));
    terminal.press(&["C-z"]);
    terminal.shows("that it is stopped", |screen| {
        screen.contains("Stopped") && !screen.contains("q quits")
    });
    terminal.types("fg");
    terminal.press(&["Enter"]);
    terminal.shows("the keys", |screen| screen.contains("q quits"));
    // What is typed before it ended would be its own.
    terminal.shows_at("q", "the prompt", |screen| {
        !screen.contains("q quits") && screen.trim_end().ends_with('#')
    });
    terminal.types("echo ended as $?");
    terminal.press(&["Enter"]);
    terminal.shows("the end", |screen| screen.contains("\nended as 0"));
}
