//! Programs whose memory a debugger reads while part of it is out.

use crate::beside::crash::{send, verifier};
use crate::support::{Limits, MIB, Program, Running, compiled, find_program};
use memfold_testing::store::{StoreServer, store_programs};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// Where a core file has memory: `(address, bytes, offset)`.
fn segments(core: &File) -> Vec<(u64, u64, u64)> {
    const LOAD: u32 = 1;
    const HEADER: usize = 56;
    let read = |offset: u64, bytes: usize| {
        let mut buffer = vec![0; bytes];
        core.read_exact_at(&mut buffer, offset).expect("a header");
        buffer
    };
    let word = |bytes: &[u8], at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let header = read(0, 64);
    let count = u16::from_le_bytes([header[56], header[57]]);
    let table = read(word(&header, 32), usize::from(count) * HEADER);
    table
        .chunks_exact(HEADER)
        .filter(|entry| entry[..4] == LOAD.to_le_bytes())
        .map(|entry| (word(entry, 16), word(entry, 32), word(entry, 8)))
        .collect()
}

/// How many pages from an address on are in a core file as `held.c` wrote them.
fn pages_as_written(core: &Path, start: u64, pages: usize) -> usize {
    let core = File::open(core).expect("the core file");
    let segments = segments(&core);
    let is_as_written = |page: &usize| {
        let address = start + (page * PAGE) as u64;
        let holds =
            |(first, bytes, _): &&(u64, u64, u64)| (*first..first + bytes).contains(&address);
        let Some((first, _, offset)) = segments.iter().find(holds) else {
            return false;
        };
        let mut found = [0; PAGE];
        core.read_exact_at(&mut found, offset + address - first)
            .expect("what the header names");
        let mut expected = [(page % 251) as u8; PAGE];
        expected[..8].copy_from_slice(&(*page as u64).to_le_bytes());
        found == expected
    };
    (0..pages).filter(is_as_written).count()
}

fn anonymous_bytes(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.expect("a size") * 1024
}

/// Whether a process has no more than this in memory within 20 s.
fn is_held_to(process: i32, bytes: u64) -> bool {
    let since = Instant::now();
    while anonymous_bytes(process) > bytes {
        if since.elapsed() > Duration::from_secs(20) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Has a debugger hold a process until it has so much in memory, and do something then.
fn debug(process: i32, kilobytes: u64, commands: &[String]) -> Output {
    let is_back = format!("awk '/RssAnon/ {{ exit $2 < {kilobytes} }}' /proc/{process}/status");
    let mut gdb = Command::new(find_program("gdb").expect("it is there"));
    gdb.args(["-nx", "-batch", "-p", &process.to_string(), "-ex"]);
    gdb.arg(format!(
        "shell for i in $(seq 400); do {is_back} && exit; sleep 0.05; done"
    ));
    for command in commands {
        gdb.args(["-ex", command]);
    }
    gdb.args(["-ex", "detach"]).stdin(Stdio::null());
    gdb.output().expect("gdb runs")
}

/// What `held.c` says first: its PID, and where its memory begins.
fn process_and_memory(running: &mut Running) -> (i32, u64) {
    running.wait_for_output(10);
    let text = String::from_utf8_lossy(&running.output_so_far()).into_owned();
    let (process, start) = text.trim().split_once(' ').expect("two numbers");
    let process = process.parse().expect("a process");
    (process, u64::from_str_radix(start, 16).expect("an address"))
}

#[test]
fn a_core_made_of_a_program_holds_all_its_pages() {
    beside!(&["cc", "gdb"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut running = Program::new(compiled("held", &["held.c"], &[]))
        .arg("100")
        .timeout(Duration::from_secs(90))
        .start(Limits::Total(40 * MIB));
    let (process, start) = process_and_memory(&mut running);
    assert!(is_held_to(process, 40 * MIB), "nothing went out");
    let core = folder.path().join("core");
    // As gcore does, but for the pause: docs/limits.md says what reads right after the stop miss.
    let can_be_read = format!(
        "dd if=/proc/{process}/mem of=/dev/null bs=1M iflag=skip_bytes skip={start} count=100 2>/dev/null"
    );
    let until_all_is_back =
        format!("shell for i in $(seq 300); do {can_be_read} && break; sleep 0.1; done");
    let gcore = Command::new(find_program("gdb").expect("it is there"))
        .args(["-nx", "-batch", "-p", &process.to_string()])
        .args(["-ex", &until_all_is_back, "-ex"])
        .arg(format!("gcore {}", core.display()))
        .args(["-ex", "detach"])
        .stdin(Stdio::null())
        .output()
        .expect("gdb runs");
    let said = String::from_utf8_lossy(&gcore.stderr);
    assert_eq!(pages_as_written(&core, start, 25_600), 25_600, "{said}");
    assert!(is_held_to(process, 41 * MIB), "the limit was lost");
    kill(Pid::from_raw(process), Signal::SIGUSR1).expect("the program waits");
    let outcome = running.wait();
    outcome.assert_success();
    assert!(outcome.text().ends_with("held ok\n"), "{}", outcome.text());
    // On busy CPUs reclaim may say, too, that it found nothing to page out.
    let warnings = outcome.errors.matches("is stopped by a debugger").count();
    assert_eq!(warnings, 1, "{}", outcome.errors);
}

/// Pages that a fork shares are write-protected near the limit, and a tracer's write to such a page fails.
#[test]
fn a_debugger_writes_to_a_program_that_has_forked() {
    beside!(&["cc", "gdb", "awk"]);
    let (pages, step) = (32 * 256, 256);
    let mut running = Program::new(compiled("held", &["held.c"], &[]))
        .args(["32", "forked"])
        .timeout(Duration::from_secs(60))
        .start(Limits::Resident(16 * MIB));
    let (process, start) = process_and_memory(&mut running);
    let write = |page: usize| {
        let (address, word) = (start + (page * PAGE) as u64, !(page as u64));
        format!("set var *(unsigned long *){address:#x} = {word:#x}")
    };
    let writes: Vec<String> = (0..pages).step_by(step).map(write).collect();
    let gdb = debug(process, 32_768, &writes);
    kill(Pid::from_raw(process), Signal::SIGUSR1).expect("the program waits");
    let outcome = running.wait();
    outcome.assert_success();
    let expected = format!("{} turned\nheld ok\n", pages / step);
    let said = String::from_utf8_lossy(&gdb.stderr);
    assert!(
        outcome.text().ends_with(&expected),
        "{} {said}",
        outcome.text()
    );
}

/// Pages that were only read take memory at the first write, which waits for room, but for a tracer's.
#[test]
fn pages_of_zeros_that_a_debugger_held_are_written_within_the_limit() {
    beside!(&["cc", "gdb", "awk"]);
    let mut running = Program::new(compiled("zeros", &["zeros.c"], &[]))
        .args(["96", "before", "wait"])
        .timeout(Duration::from_secs(60))
        .start(Limits::Resident(32 * MIB));
    running.wait_for_output(2);
    let process = String::from_utf8_lossy(&running.output_so_far()).into_owned();
    let process: i32 = process.trim().parse().expect("a process");
    debug(process, 0, &["shell sleep 0.3".to_owned()]);
    kill(Pid::from_raw(process), Signal::SIGUSR1).expect("the program waits");
    let outcome = running.wait();
    outcome.assert_success();
    let text = outcome.text();
    let peak = text.split_once("VmHWM:").and_then(|(_, rest)| {
        let kilobytes = rest.split_whitespace().next()?;
        kilobytes.parse::<u64>().ok()
    });
    assert!(peak.is_some_and(|peak| peak < 38 * 1024), "{text}");
    assert!(text.ends_with("zeros ok\n"), "{text}");
}

#[test]
fn a_debugger_raises_the_limit_by_what_comes_back_from_a_store() {
    let [server, client] = store_programs();
    beside!(&["cc", "gdb", "awk", server, client]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let server = StoreServer::start(folder.path(), &[]);
    let result = folder.path().join("result");
    let address = format!("valkey://127.0.0.1:{}", server.port);
    let mut running = verifier(&result)
        .memfold_options(["--remote", &address])
        .timeout(Duration::from_secs(90))
        .start(Limits::Total(24 * MIB));
    running.wait_for_output(2);
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    let mut now = running.statistics();
    // It is sent while the program goes on.
    while number(&now["remote_bytes"]) <= MIB {
        std::thread::sleep(Duration::from_millis(20));
        now = running.statistics();
    }
    let process = number(&now["programs"][0]["pid"]) as i32;
    let gdb = debug(process, 65_536, &[]);
    running.wait_for_output(running.output_so_far().len() + 1);
    send(Signal::SIGTERM, running.root());
    let outcome = running.wait();
    assert_eq!(fs::read_to_string(&result).expect("the result"), "");
    let (_, warning) = outcome
        .errors
        .split_once("brought back ")
        .unwrap_or_else(|| panic!("{} {gdb:?}", outcome.errors));
    let kilobytes = warning.split_whitespace().next();
    let kilobytes: u64 = kilobytes.and_then(|one| one.parse().ok()).expect("a size");
    // All but what was resident, and the program's own few pages.
    assert!(kilobytes <= 65 * 1024, "{kilobytes} KiB came back");
    assert!(kilobytes > 32 * 1024, "{kilobytes} KiB came back");
}
