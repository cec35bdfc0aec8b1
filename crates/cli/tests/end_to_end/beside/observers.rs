//! `--metrics` and `--timeline`.

use crate::support::memfold;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A run with these options, of a program that waits for the end of its input.
fn start(options: &[&str]) -> Child {
    Command::new(memfold())
        .args(["run", "--limit", "64M"])
        .args(options)
        .args(["--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("memfold starts")
}

fn end(mut run: Child) -> Output {
    drop(run.stdin.take());
    run.wait_with_output().expect("it ends")
}

/// Repeats until there is something, for ten seconds.
fn patiently<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).expect("it is sent");
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

#[test]
fn metrics_are_served_at_a_private_socket_that_goes_with_the_run() {
    beside!(&["cat"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("m.sock");
    let address = format!("unix:{}", path.display());
    let run = start(&["--metrics", &address]);
    let stream = patiently(|| UnixStream::connect(&path).ok());
    let answer = ask(stream, GET);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(
        answer.contains("\nmemfold_limit_bytes 67108864\n"),
        "{answer}"
    );
    let mode = fs::metadata(&path).expect("the socket").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let second = end(start(&["--metrics", &address]));
    assert_eq!(second.status.code(), Some(125));
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("cannot listen at --metrics unix:"), "{said}");
    assert!(end(run).status.success());
    assert!(!path.exists());
}

/// Any local user may connect, and do so slowly, at length, or without a word.
#[test]
fn a_port_is_not_held_by_who_says_nothing() {
    beside!(&["cat"]);
    let port = memfold_testing::store::free_port();
    let run = start(&["--metrics", &format!("localhost:{port}")]);
    let silent: Vec<TcpStream> = (0..40)
        .map(|_| patiently(|| TcpStream::connect(("127.0.0.1", port)).ok()))
        .collect();
    let mut endless = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    let _ = endless.write_all(&vec![b'a'; 1 << 20]);
    let began = Instant::now();
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    let answer = ask(stream, GET);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
    drop(silent);
    let began = Instant::now();
    let _held = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    assert!(end(run).status.success());
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn an_address_that_others_reach_is_refused() {
    let refused = end(start(&["--metrics", "0.0.0.0:9464"]));
    assert_eq!(refused.status.code(), Some(125));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("only loopback addresses"), "{said}");
}

fn draw(folder: &Path, file: &str, script: &str) -> Output {
    Command::new(memfold())
        .args([
            "run",
            "--limit",
            "64M",
            "--timeline",
            file,
            "--",
            "sh",
            "-c",
            script,
        ])
        .current_dir(folder)
        .output()
        .expect("memfold runs")
}

#[test]
fn a_run_is_drawn_into_one_file_and_names_are_text() {
    beside!(&["sh", "cp", "sleep"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let folder = folder.path();
    // As long as one look more does not count: what drawing takes is a share of the time.
    let evil = "cp \"$(command -v sleep)\" './<script>&x' && './<script>&x' 4";
    for file in ["run.svg", "run.html"] {
        let run = draw(folder, file, evil);
        assert!(run.status.success(), "{run:?}");
        let text = fs::read_to_string(folder.join(file)).expect("the picture");
        assert!(text.contains("&lt;script&gt;&amp;x ("), "{text}");
        assert!(!text.contains("<script"), "{text}");
        assert!(text.contains("limit 64.0 MiB"), "{text}");
    }
    let page = fs::read_to_string(folder.join("run.html")).expect("the page");
    let (before, _) = page.split_once(" % of a CPU").expect("what it took");
    let share = before.rsplit(' ').next().expect("a number");
    assert!(share.parse::<f64>().expect("a number") < 0.1, "{share}");
}

#[test]
fn a_picture_is_written_with_the_care_of_the_statistics() {
    beside!(&["sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let folder = folder.path();
    fs::write(folder.join("real.svg"), "old").expect("a file");
    symlink("real.svg", folder.join("link.svg")).expect("a link");
    assert!(draw(folder, "link.svg", "true").status.success());
    let link = fs::symlink_metadata(folder.join("link.svg")).expect("the link");
    assert!(link.is_symlink());
    let text = fs::read_to_string(folder.join("real.svg")).expect("the file");
    assert!(text.starts_with("<svg"), "{text}");
    let refused = draw(folder, "no/run.svg", "touch started");
    assert_eq!(refused.status.code(), Some(125));
    assert!(
        !folder.join("started").exists(),
        "it is refused before the program starts"
    );
    let refused = draw(folder, "run.png", "true");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("ends in .html or .svg"), "{said}");
}
