//! `memfold stat` and `memfold swapoff` with disks.

use crate::raw_client::RawClient;
use crate::support::{MEMFOLD, MIB, Served, has, memfold, run};
use memfold_testing::skip;
use nix::sys::signal::Signal;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn write_noise(served: &Served, mebibytes: usize) -> Vec<u8> {
    let mut random = memfold_testing::Random::new(3);
    let bytes: Vec<u8> = (0..mebibytes * MIB)
        .map(|_| random.below(256) as u8)
        .collect();
    let path = served.folder.path().join("noise").display().to_string();
    std::fs::write(&path, &bytes).expect("a file");
    run("nbdcopy", &[&path, &served.uri()]);
    bytes
}

/// A core file would hold the disk, the key of its swap file and the store's password.
#[test]
fn no_core_file_is_left_and_descriptors_are_as_many_as_may_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("sh");
    let script = "ulimit -S -c $(ulimit -H -c) && ulimit -S -n 256 && exec \"$0\" \"$@\"";
    command
        .current_dir(folder.path())
        .args(["-c", script, MEMFOLD]);
    let mut served = Served::start_by(command, &["--size", "16M", "--limit", "16M"]);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", served.pid()));
    let limits = limits.expect("its limits");
    let line = limits.lines().find(|line| line.starts_with("Max open"));
    let words: Vec<_> = line.expect("a limit").split_whitespace().collect();
    assert_eq!(words[3], words[4], "{limits}");
    served.signal(Signal::SIGQUIT);
    let status = served.wait();
    assert_eq!(status.signal(), Some(Signal::SIGQUIT as i32));
    assert!(!status.core_dumped());
    let left = std::fs::read_dir(folder.path()).expect("a folder");
    assert_eq!(left.count(), 0);
}

/// `nohup` ignores SIGHUP, and a script SIGINT for what it starts by `&`.
#[test]
fn signals_that_were_ignored_at_the_start_do_not_end_a_disk() {
    let mut command = Command::new("sh");
    let script = "trap '' HUP INT; exec \"$0\" \"$@\"";
    command.args(["-c", script, MEMFOLD]);
    let served = Served::start_by(command, &["--size", "16M", "--limit", "16M"]);
    let mut client = RawClient::of(&served);
    let written = [7; 4096];
    assert_eq!(client.write(0, &written), 0);
    for signal in [Signal::SIGHUP, Signal::SIGINT] {
        served.signal(signal);
        // It would take milliseconds to end.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(client.read(0, 4096), Ok(written.to_vec()), "{signal}");
    }
    served.end(Signal::SIGTERM);
}

/// What was stored in zspages of one length takes no address space from those of others.
#[test]
fn a_full_disk_that_was_emptied_takes_other_data() {
    if !has(&["nbdcopy", "qemu-io"]) {
        return;
    }
    let served = Served::start(&["--size", "256M", "--limit", "32M"]);
    let mut random = memfold_testing::Random::new(5);
    // About 1200 bytes of each block are stored.
    let mut text = vec![0; 80 * MIB];
    for block in text.chunks_exact_mut(4096) {
        block[..1150].fill_with(|| random.below(256) as u8);
    }
    let path = served.folder.path().join("text").display().to_string();
    std::fs::write(&path, &text).expect("a file");
    run("nbdcopy", &["--destination-is-zero", &path, &served.uri()]);
    run(
        "qemu-io",
        &["-f", "raw", "-c", "discard 0 256M", &served.uri()],
    );
    write_noise(&served, 16);
}

#[test]
fn stat_knows_a_disk_while_it_is_served() {
    if !has(&["nbdcopy"]) {
        return;
    }
    let served = Served::start(&["--size", "48M", "--limit", "32M"]);
    write_noise(&served, 8);
    let disk = served.stat();
    assert_eq!(disk["kind"], "disk", "{disk}");
    assert_eq!(disk["pid"].to_string(), served.pid());
    assert_eq!(disk["address"], served.uri());
    assert_eq!(disk["original_bytes"], 8 * MIB, "{disk}");
    assert_eq!(disk["limit_bytes"], 32 * MIB, "{disk}");
    let name = |count: &str| disk[count].as_u64().expect("a number");
    assert!(
        name("used_bytes") > 8 * MIB as u64 && name("connections") >= 1,
        "{disk}"
    );
    let (status, text) = memfold(&["stat"]);
    let line = format!("disk {} (memfold {})", served.uri(), served.pid());
    assert!(status == 0 && text.contains(&line), "{text}");
    assert!(text.contains("8.0 MiB at 1.0:1"), "{text}");
    // The header and a line, then the disk ends and with it the watching.
    let mut watching = Command::new(MEMFOLD);
    let watching = watching
        .args(["stat", "--watch", &served.pid()])
        .stdout(Stdio::piped());
    let mut watching = watching.spawn().expect("memfold runs");
    let stdout = watching.stdout.take().expect("a pipe");
    let mut stdout = BufReader::new(stdout);
    let mut text = String::new();
    for _ in 0..2 {
        stdout.read_line(&mut text).expect("a line");
    }
    let pid = served.pid();
    served.end(Signal::SIGTERM);
    stdout.read_to_string(&mut text).expect("text");
    assert!(watching.wait().expect("it ends").success());
    assert!(text.contains("disk nbd+unix:///?socket="), "{text}");
    let (status, text) = memfold(&["stat", &pid]);
    assert!(
        status == 1 && text.contains("no run or disk of this user"),
        "{text}"
    );
}

#[test]
fn a_disk_gives_its_file_up_or_says_why_not() {
    if !has(&["nbdcopy"]) {
        return;
    }
    let served = Served::start(&["--size", "48M", "--limit", "16M"]);
    let (status, text) = memfold(&["swapoff", &served.pid()]);
    assert!(
        status == 1 && text.contains("this disk has no swap file"),
        "{text}"
    );
    for command in [
        &["limit", &served.pid(), "32M"][..],
        &["reclaim", &served.pid()],
    ] {
        let (status, text) = memfold(command);
        assert!(status == 1 && text.contains("serves a disk"), "{text}");
    }
    drop(served);
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().display().to_string();
    let file = ["--swap-file", &folder, "--swap-size", "64M"];
    let served = Served::start(&[&["--size", "48M", "--limit", "16M"], &file[..]].concat());
    let expected = write_noise(&served, 32);
    let (status, text) = memfold(&["swapoff", &served.pid()]);
    assert!(
        status == 1 && text.contains("do not fit into 7/8 of the limit"),
        "{text}"
    );
    assert!(
        served.stat()["file_blocks"].as_u64() > Some(15 * 256),
        "{}",
        served.stat()
    );
    // What is left once most of it is discarded comes back.
    run(
        "fio",
        &[
            "--name=trim",
            "--ioengine=nbd",
            &format!("--uri={}", served.uri()),
            "--rw=trim",
            "--bs=4M",
            "--size=28M",
            "--minimal",
        ],
    );
    let (status, text) = memfold(&["swapoff", &served.pid()]);
    assert!(
        status == 0 && text.contains(&format!("blocks of disk {}", served.pid())),
        "{text}"
    );
    assert_eq!(served.stat()["file_blocks"], 0);
    let back = served.folder.path().join("back").display().to_string();
    run("nbdcopy", &[&served.uri(), &back]);
    let back = std::fs::read(back).expect("a file");
    assert!(
        back[28 * MIB..32 * MIB] == expected[28 * MIB..],
        "it is another's data"
    );
    assert!(back[..28 * MIB].iter().all(|byte| *byte == 0));
}

#[test]
fn only_its_user_and_root_know_a_disk() {
    if !nix::unistd::geteuid().is_root() || !has(&["setpriv"]) {
        skip("root and setpriv, for another user");
        return;
    }
    let other = |uid: u32, program: &str| {
        let mut command = Command::new("setpriv");
        let uid = uid.to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", program]);
        command.env_remove("XDG_RUNTIME_DIR").env_remove("TMPDIR");
        command
    };
    // A copy that other users can execute.
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open).expect("it is root's");
    let copy = folder.path().join("memfold").display().to_string();
    std::fs::copy(MEMFOLD, &copy).expect("a copy");
    let ask = |uid, arguments: &[&str]| {
        let output = other(uid, &copy).args(arguments).output().expect("it runs");
        String::from_utf8(output.stdout).expect("text")
            + &String::from_utf8(output.stderr).expect("text")
    };
    let roots = Served::start(&["--size", "48M", "--limit", "16M"]);
    let socket = folder.path().join("others.sock");
    let mut others = other(4711, &copy)
        .args(["serve", "--size=48M", "--limit=16M", "--quiet"])
        .arg(format!("--nbd=unix:{}", socket.display()))
        .spawn()
        .expect("memfold starts");
    let began = Instant::now();
    while UnixStream::connect(&socket).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = others.id().to_string();
    let seen_by_root = memfold(&["stat", &pid]).1;
    let seen_by_owner = ask(4711, &["stat", &pid]);
    let seen_by_another = ask(4712, &["stat", &pid]);
    let swapped_off = ask(4712, &["swapoff", &pid]);
    let roots_for_another = ask(4712, &["swapoff", &roots.pid()]);
    // It may have ended.
    let _ = others.kill();
    let _ = others.wait();
    assert!(seen_by_root.contains("others.sock"), "{seen_by_root}");
    assert!(seen_by_owner.contains("others.sock"), "{seen_by_owner}");
    for refused in [seen_by_another, swapped_off, roots_for_another] {
        assert!(refused.contains("no run or disk of this user"), "{refused}");
    }
}
