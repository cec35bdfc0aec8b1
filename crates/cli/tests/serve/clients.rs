//! The clients that people use.

use crate::support::{MEMFOLD, MIB, Served, has, run};
use memfold_testing::store::{StoreServer, free_port, store_programs};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Copies a disk out, which must hold these bytes.
fn assert_returns(served: &Served, bytes: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let back = folder.path().join("back").display().to_string();
    run("nbdcopy", &[&served.uri(), &back]);
    assert!(std::fs::read(back).expect("a file") == bytes);
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
fn an_image_goes_there_and_back_over_tcp() {
    if !has(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    let address = format!("127.0.0.1:{}", free_port());
    let listens = format!("--nbd={address}");
    let mut server = Command::new(MEMFOLD)
        .args(["serve", &listens, "--size", "48M", "--limit", "32M"])
        .spawn()
        .expect("memfold starts");
    let began = Instant::now();
    while TcpStream::connect(&address).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let expected = image(Path::new(&file("image")));
    let uri = format!("nbd://{address}");
    let size = run("nbdinfo", &["--size", &uri]);
    run("nbdcopy", &[&file("image"), &uri]);
    run("nbdcopy", &[&uri, &file("back")]);
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&size.stdout).trim(), "50331648");
    assert!(std::fs::read(file("back")).expect("a file") == expected);
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
            // Else it leaves a file in the working directory.
            "--verify_state_save=0",
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
    assert_returns(&served, &bytes);
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
fn what_does_not_fit_goes_to_a_store_on_other_machines() {
    if !has(&[store_programs()[0], store_programs()[1], "nbdcopy"]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let server = StoreServer::start(folder.path(), &[]);
    let mut random = memfold_testing::Random::new(7);
    let bytes: Vec<u8> = (0..4 * MIB)
        .flat_map(|_| random.next_word().to_le_bytes())
        .collect();
    let path = folder.path().join("noise").display().to_string();
    std::fs::write(&path, &bytes).expect("a file");
    let remote = format!("valkey://127.0.0.1:{}", server.port);
    let served = Served::start(&["--size", "32M", "--limit", "8M", "--remote", &remote]);
    run("nbdcopy", &[&path, &served.uri()]);
    assert_ne!(server.ask(&["DBSIZE"]), "0");
    assert_returns(&served, &bytes);
    let (stats, _) = served.end(nix::sys::signal::Signal::SIGTERM);
    assert!(
        stats["peak_bytes"].as_u64() <= Some(8 * MIB as u64),
        "{stats}"
    );
    assert!(
        stats["remote_bytes"].as_u64() > Some(20 * MIB as u64),
        "{stats}"
    );
    assert_eq!(server.ask(&["DBSIZE"]), "0");
}

#[test]
fn a_limit_above_what_there_is_is_warned_of() {
    let served = Served::start(&["--size", "16M", "--limit", "1024T"]);
    let (_, said) = served.end(nix::sys::signal::Signal::SIGTERM);
    let warning = "--limit 1024 TiB is more than this host or control group allows";
    assert!(said.contains(warning), "{said}");
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
