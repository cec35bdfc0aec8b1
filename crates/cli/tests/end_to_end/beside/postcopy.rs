//! QEMU's postcopy migration: the machine that arrives runs before its memory is there, and QEMU fetches each
//! page when it is missing, by a userfaultfd of its own.

use crate::support::{Limits, MIB, Outcome, Program, Running, compiled};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Limits = Limits::Total(48 * MIB);
/// Bytes a second that are sent: less than the guest writes, so that only postcopy comes to an end, and so
/// little that the guest asks for pages.
const BANDWIDTH: u64 = 20 * MIB;
const PATIENCE: Duration = Duration::from_secs(60);

/// A virtual machine under memfold, with a guest that writes to all of its memory without a pause.
struct Machine {
    running: Running,
    console: PathBuf,
    monitor: BufReader<UnixStream>,
}

impl Machine {
    fn start(folder: &Path, name: &str, options: &[&str]) -> Machine {
        let link = [
            "-m32",
            "-nostdlib",
            "-static",
            "-Wl,--build-id=none,--oformat=binary,-Ttext=0x7c00,-N",
            "-DBYTES=0x3000000",
        ];
        let disk = compiled("guest", &["guest.S"], &link);
        let console = folder.join(format!("{name}.console"));
        let socket = folder.join(format!("{name}.monitor"));
        let running = Program::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-machine", "pc", "-accel", "tcg", "-m", "64", "-drive"])
            .arg(format!(
                "file={},format=raw,if=floppy,readonly=on",
                disk.display()
            ))
            .args(["-debugcon", &format!("file:{}", console.display())])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(options)
            .timeout(PATIENCE)
            .start(LIMIT);
        let monitor = eventually("a monitor", || UnixStream::connect(&socket).ok());
        let mut machine = Machine {
            running,
            console,
            monitor: BufReader::new(monitor),
        };
        machine.answer();
        machine.ask("qmp_capabilities", json!({}));
        machine
    }

    /// The next answer of the monitor.
    fn answer(&mut self) -> Value {
        loop {
            let mut line = String::new();
            let read = self.monitor.read_line(&mut line).expect("an answer");
            assert!(read > 0, "the monitor hung up");
            let answer: Value = serde_json::from_str(&line).expect("JSON");
            if answer.get("event").is_none() {
                return answer;
            }
        }
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let question = json!({ "execute": command, "arguments": arguments });
        writeln!(self.monitor.get_mut(), "{question}").expect("a question");
        let mut answer = self.answer();
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].take()
    }

    /// What the guest has printed: a dot for some rounds through its memory.
    fn printed(&self) -> String {
        fs::read_to_string(&self.console).unwrap_or_default()
    }

    /// Waits until the guest has gone through its memory a few times from now on.
    fn goes_on(&self) {
        let before = self.printed().len();
        eventually("a round", || (self.printed().len() > before).then_some(()));
        let printed = self.printed();
        assert!(!printed.contains('!'), "a page is wrong: {printed}");
    }

    fn end(mut self) -> Outcome {
        // Its end, whether it was asked for or not, says more than the monitor's.
        let _ = writeln!(self.monitor.get_mut(), r#"{{ "execute": "quit" }}"#);
        let outcome = self.running.wait();
        outcome.assert_success();
        outcome
    }
}

fn eventually<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "no {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Migrates a machine; returns what QEMU says of it in the end.
fn migrate(source: &mut Machine, target: &mut Machine, socket: &Path) -> Value {
    let address = format!("unix:{}", socket.display());
    let postcopy = json!({ "capabilities": [{ "capability": "postcopy-ram", "state": true }] });
    source.ask("migrate-set-capabilities", postcopy.clone());
    target.ask("migrate-set-capabilities", postcopy);
    let bandwidth = json!({ "max-bandwidth": BANDWIDTH, "max-postcopy-bandwidth": BANDWIDTH });
    source.ask("migrate-set-parameters", bandwidth);
    target.ask("migrate-incoming", json!({ "uri": address }));
    source.ask("migrate", json!({ "uri": address }));
    let (began, mut is_post) = (Instant::now(), false);
    loop {
        let state = source.ask("query-migrate", json!({}));
        match state["status"].as_str() {
            Some("completed") => return state,
            Some("failed" | "cancelled" | "postcopy-paused") => panic!("{state}"),
            _ => {}
        }
        // All of the memory was sent once, and most of it was written since.
        if !is_post && state["ram"]["dirty-sync-count"].as_u64() >= Some(2) {
            source.ask("migrate-start-postcopy", json!({}));
            is_post = true;
        }
        assert!(began.elapsed() < PATIENCE, "{state}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_machine_migrates_by_postcopy_from_one_run_to_another() {
    beside!(&["cc", "qemu-system-x86_64"]);
    let folder = tempfile::tempdir().expect("a folder");
    let mut source = Machine::start(folder.path(), "source", &[]);
    source.goes_on();
    let mut target = Machine::start(folder.path(), "target", &["-incoming", "defer"]);
    let state = migrate(&mut source, &mut target, &folder.path().join("migration"));
    let fetched = state["ram"]["postcopy-bytes"].as_u64();
    assert!(fetched > Some(8 * MIB), "hardly by postcopy: {state}");
    target.goes_on();
    let source = source.end();
    assert!(
        source.number("pages_out") > 5000.0,
        "hardly anything was out at the source"
    );
    target.end();
}
