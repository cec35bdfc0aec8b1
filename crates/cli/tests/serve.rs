//! `memfold serve` with the clients that people use. None of it needs root.

use memfold_testing::skip;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MEMFOLD: &str = env!("CARGO_BIN_EXE_memfold");
const MIB: usize = 1 << 20;

/// A server, and the folder with its socket.
struct Served {
    child: Child,
    folder: tempfile::TempDir,
}

impl Served {
    fn start(options: &[&str]) -> Served {
        Self::start_by(Command::new(MEMFOLD), options)
    }

    /// Starts it by a command that runs memfold.
    fn start_by(mut command: Command, options: &[&str]) -> Served {
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

    fn socket(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// What `memfold stat --json` says of it.
    fn stat(&self) -> serde_json::Value {
        let output = run(MEMFOLD, &["stat", "--json", &self.pid()]);
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Ends it by a signal; its statistics and what it said.
    fn end(mut self, signal: nix::sys::signal::Signal) -> (serde_json::Value, String) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("it runs");
        let status = self.child.wait().expect("it ends");
        let mut said = String::new();
        let errors = self.child.stderr.take().expect("a pipe");
        { errors }.read_to_string(&mut said).expect("text");
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

fn has(tools: &[&str]) -> bool {
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

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    let output = output.expect("the client runs");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    output
}

/// An image with holes, text, and bytes that do not compress.
fn image(path: &Path) -> Vec<u8> {
    let mut random = memfold_testing::Random::new(1);
    let mut image = vec![0; 48 * MIB];
    for (index, byte) in image[3 * MIB..13 * MIB].iter_mut().enumerate() {
        *byte = b"the quick brown fox "[index / 3 % 20];
    }
    image[20 * MIB + 77..23 * MIB].fill_with(|| random.below(256) as u8);
    std::fs::write(path, &image).expect("a file");
    image
}

#[test]
fn an_image_goes_there_and_back() {
    if !has(&["nbdcopy", "nbdinfo", "qemu-img"]) {
        return;
    }
    let served = Served::start(&["--size", "48M", "--limit", "32M"]);
    let file = |name: &str| served.folder.path().join(name).display().to_string();
    let expected = image(Path::new(&file("image")));
    run("nbdcopy", &[&file("image"), &served.uri()]);
    run("nbdcopy", &[&served.uri(), &file("back")]);
    assert!(std::fs::read(file("back")).expect("a file") == expected);
    run(
        "qemu-img",
        &["convert", "-O", "raw", &served.uri(), &file("converted")],
    );
    assert!(std::fs::read(file("converted")).expect("a file") == expected);
    run(
        "qemu-img",
        &[
            "compare",
            "-f",
            "raw",
            "-F",
            "raw",
            &file("image"),
            &served.uri(),
        ],
    );
    let info = run("nbdinfo", &["--json", "--map", &served.uri()]);
    let map: serde_json::Value = serde_json::from_slice(&info.stdout).expect("JSON");
    let holes = map.as_array().expect("extents").iter();
    let holes: u64 = { holes }
        .filter(|extent| extent["type"] == 3)
        .filter_map(|extent| extent["length"].as_u64())
        .sum();
    assert!(holes >= 30 * MIB as u64, "{map}");
    run("nbdinfo", &["--can", "zero", &served.uri()]);
    let (stats, said) = served.end(nix::sys::signal::Signal::SIGTERM);
    assert!(
        stats["written_bytes"].as_u64() >= Some(13 * MIB as u64),
        "{stats}"
    );
    assert!(stats["peak_bytes"].as_u64() <= stats["limit_bytes"].as_u64());
    // Three of 13 MiB do not compress.
    assert!(
        stats["used_bytes"].as_u64() < Some(8 * MIB as u64),
        "{stats}"
    );
    assert!(said.contains("at the peak"), "{said}");
}

#[test]
fn fio_finds_no_wrong_byte() {
    if !has(&["fio"]) {
        return;
    }
    for algorithm in ["lz4", "zstd"] {
        let served = Served::start(&["--size", "64M", "--limit", "96M", "--algo", algorithm]);
        let job = [
            "--name=verify",
            "--ioengine=nbd",
            &format!("--uri={}", served.uri()),
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--size=64M",
            "--iodepth=16",
            "--verify=crc32c",
            "--buffer_compress_percentage=60",
            "--refill_buffers",
            "--minimal",
        ];
        run("fio", &job);
        let (stats, _) = served.end(nix::sys::signal::Signal::SIGINT);
        assert_eq!(stats["failed_reads"], 0, "{stats}");
        assert_eq!(stats["failed_writes"], 0, "{stats}");
    }
}

#[test]
fn what_does_not_fit_goes_to_the_file_or_is_refused() {
    if !has(&["nbdcopy"]) {
        return;
    }
    let noise = tempfile::tempdir().expect("a folder");
    let path = noise.path().join("noise").display().to_string();
    let mut random = memfold_testing::Random::new(2);
    let bytes: Vec<u8> = (0..32 * MIB).map(|_| random.below(256) as u8).collect();
    std::fs::write(&path, &bytes).expect("a file");
    // Without a file it says that there is no space.
    let served = Served::start(&["--size", "32M", "--limit", "8M"]);
    let refused = Command::new("nbdcopy")
        .args([&path, &served.uri()])
        .output();
    let refused = String::from_utf8(refused.expect("it runs").stderr).expect("text");
    assert!(refused.contains("No space left"), "{refused}");
    let (stats, said) = served.end(nix::sys::signal::Signal::SIGHUP);
    assert!(
        stats["peak_bytes"].as_u64() <= Some(8 * MIB as u64),
        "{stats}"
    );
    assert!(said.contains("raise --limit"), "{said}");
    // With one it keeps everything, within the limit.
    let folder = noise.path().display().to_string();
    let file = ["--swap-file", &folder, "--swap-size", "64M"];
    let served = Served::start(&[&["--size", "32M", "--limit", "8M"], &file[..]].concat());
    run("nbdcopy", &[&path, &served.uri()]);
    let back = noise.path().join("back").display().to_string();
    run("nbdcopy", &[&served.uri(), &back]);
    assert!(std::fs::read(back).expect("a file") == bytes);
    let (stats, _) = served.end(nix::sys::signal::Signal::SIGTERM);
    assert!(
        stats["peak_bytes"].as_u64() <= Some(8 * MIB as u64),
        "{stats}"
    );
    assert!(
        stats["file_bytes"].as_u64() > Some(20 * MIB as u64),
        "{stats}"
    );
}

#[test]
fn mistakes_are_said_in_one_line() {
    let refused = |arguments: &[&str], words: &str| {
        let output = Command::new(MEMFOLD).arg("serve").args(arguments).output();
        let output = output.expect("memfold runs");
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.contains(words) && said.lines().count() <= 2, "{said}");
    };
    refused(
        &["--nbd", "unix:/no/such/folder/s", "--size", "1G"],
        "cannot listen at unix:/no/such",
    );
    refused(
        &["--nbd", "0.0.0.0:10809", "--size", "1G"],
        "--allow-everybody",
    );
    refused(
        &["--nbd", "nonsense", "--size", "1G"],
        "unix:PATH or HOST:PORT",
    );
    refused(&["--nbd", "unix:/tmp/x", "--size", "1"], "too little");
    refused(
        &[
            "--nbd",
            "unix:/tmp/x",
            "--size",
            "1G",
            "--swap-file",
            "/tmp",
        ],
        "--swap-size",
    );
}

/// memfold's exit status and what it printed.
fn memfold(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(MEMFOLD).args(arguments).output();
    let output = output.expect("memfold runs");
    let mut text = String::from_utf8(output.stdout).expect("text");
    text += &String::from_utf8(output.stderr).expect("text");
    (output.status.code().expect("an exit"), text)
}

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
    // One line, then the disk ends and with it the watching.
    let mut watching = Command::new(MEMFOLD);
    let watching = watching
        .args(["stat", "--watch", &served.pid()])
        .stdout(Stdio::piped());
    let mut watching = watching.spawn().expect("memfold runs");
    std::thread::sleep(Duration::from_millis(300));
    let pid = served.pid();
    served.end(nix::sys::signal::Signal::SIGTERM);
    let mut text = String::new();
    let stdout = watching.stdout.take().expect("a pipe");
    { stdout }.read_to_string(&mut text).expect("text");
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
