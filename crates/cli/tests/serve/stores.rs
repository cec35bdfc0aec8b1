//! Disks on a store that hangs, is full, has lost its blocks or is gone.

use crate::raw_client::RawClient;
use crate::support::{MIB, Served, has};
use memfold_testing::Random;
use memfold_testing::store::{Passing, Proxy, StoreServer, store_programs};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

const PIECE: usize = MIB / 4;
const BLOCK: usize = 4096;
const IO_ERROR: u32 = 5;
const NO_SPACE: u32 = 28;

/// A disk of 64 MiB in 8 MiB of memory and a store behind a proxy.
struct Remote {
    server: StoreServer,
    proxy: Proxy,
    served: Served,
    _folder: tempfile::TempDir,
}

impl Remote {
    /// `None` where the host has no store.
    fn start() -> Option<Remote> {
        Self::start_with(&[])
    }

    /// The same with more options.
    fn start_with(more: &[&str]) -> Option<Remote> {
        if !has(&store_programs()) {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let server = StoreServer::start(folder.path(), &[]);
        let proxy = Proxy::to(server.port);
        let remote = format!("valkey://127.0.0.1:{}", proxy.port);
        let options = ["--size", "64M", "--limit", "8M", "--remote", &remote];
        let served = Served::start(&[&options[..], more].concat());
        Some(Remote {
            server,
            proxy,
            served,
            _folder: folder,
        })
    }
}

/// The noise that a piece of the disk gets.
fn noise(piece: u64) -> Vec<u8> {
    let mut random = Random::new(piece);
    let words = (0..PIECE / 8).flat_map(|_| random.next_word().to_le_bytes());
    words.collect()
}

/// Writes noise to these pieces of the disk until one fails; its error number, or 0.
fn write(client: &mut RawClient, pieces: std::ops::Range<u64>) -> u32 {
    let mut outcomes = pieces.map(|piece| client.write(piece * PIECE as u64, &noise(piece)));
    outcomes.find(|error| *error != 0).unwrap_or(0)
}

/// Reads these pieces block by block. The number of blocks that fail; the others are as they were written.
fn failures(client: &mut RawClient, pieces: std::ops::Range<u64>) -> u64 {
    let mut failed = 0;
    for piece in pieces {
        for (index, written) in noise(piece).chunks(BLOCK).enumerate() {
            let offset = piece * PIECE as u64 + (index * BLOCK) as u64;
            match client.read(offset, BLOCK) {
                Ok(read) => assert!(read == written, "{offset}"),
                Err(error) => {
                    assert_eq!(error, IO_ERROR, "{offset}");
                    failed += 1;
                }
            }
        }
    }
    failed
}

#[test]
fn writes_wait_for_a_store_that_hangs_and_not_for_one_that_is_full() {
    let Some(remote) = Remote::start() else {
        return;
    };
    let mut client = RawClient::of(&remote.served);
    assert_eq!(write(&mut client, 0..64), 0);
    remote.proxy.set(Passing::Held);
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(3));
            remote.proxy.set(Passing::Free);
        });
        assert_eq!(write(&mut client, 64..96), 0);
    });
    let waited = began.elapsed();
    assert!(waited >= Duration::from_secs(3), "{waited:?}");
    remote.server.ask(&["CONFIG", "SET", "maxmemory", "1mb"]);
    let began = Instant::now();
    assert_eq!(write(&mut client, 96..256), NO_SPACE);
    let waited = began.elapsed();
    assert!(waited < Duration::from_secs(10), "{waited:?}");
}

#[test]
fn a_disk_ends_at_once_though_reads_wait_for_a_store_that_hangs() {
    let Some(remote) = Remote::start() else {
        return;
    };
    let mut client = RawClient::of(&remote.served);
    assert_eq!(write(&mut client, 0..64), 0);
    remote.proxy.set(Passing::Held);
    // What was written first is in the store. Each read would wait for a minute.
    client.begin_reads(0..1000);
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    remote.served.end(Signal::SIGTERM);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_second_signal_ends_a_disk_whatever_it_waits_for() {
    let Some(mut remote) = Remote::start() else {
        return;
    };
    let mut client = RawClient::of(&remote.served);
    assert_eq!(write(&mut client, 0..64), 0);
    // Pages are removed from the store at the end, for up to five seconds.
    remote.proxy.set(Passing::Held);
    remote.served.signal(Signal::SIGTERM);
    remote.served.wait_until_next_signal_ends_it();
    let began = Instant::now();
    remote.served.signal(Signal::SIGTERM);
    // It would end by itself later, but by no signal.
    let ended_by = remote.served.wait_for_signal();
    let took = began.elapsed();
    assert_eq!(ended_by, Some(Signal::SIGTERM as i32));
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn blocks_that_a_store_has_lost_are_errors_and_the_others_are_right() {
    let Some(remote) = Remote::start() else {
        return;
    };
    let mut client = RawClient::of(&remote.served);
    assert_eq!(write(&mut client, 0..64), 0);
    assert_eq!(failures(&mut client, 0..4), 0);
    remote.server.ask(&["FLUSHALL"]);
    let in_store = remote.served.stat()["remote_blocks"].as_u64();
    let failed = failures(&mut client, 0..64);
    assert!(
        failed > 0 && Some(failed) <= in_store,
        "{failed} {in_store:?}"
    );
    assert_eq!(remote.served.stat()["failed_reads"], failed);
    // What is written again is there again.
    assert_eq!(write(&mut client, 0..4), 0);
    assert_eq!(failures(&mut client, 0..4), 0);
    let (stats, said) = remote.served.end(Signal::SIGTERM);
    assert_eq!(stats["failed_reads"], failed);
    assert!(stats["remote_failures"].as_u64() >= Some(failed), "{stats}");
    // However many there are.
    assert_eq!(said.matches("cannot be read back").count(), 1, "{said}");
}

#[test]
fn copies_in_the_file_are_read_when_the_store_is_gone() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let copies = [
        "--remote-keep-copy",
        "--swap-file",
        &path,
        "--swap-size",
        "64M",
    ];
    let Some(mut remote) = Remote::start_with(&copies) else {
        return;
    };
    let mut client = RawClient::of(&remote.served);
    assert_eq!(write(&mut client, 0..64), 0);
    let in_store = remote.served.stat()["remote_blocks"].as_u64();
    assert!(in_store > Some(1000), "{in_store:?}");
    remote.server.kill();
    assert_eq!(failures(&mut client, 0..64), 0);
    assert_eq!(remote.served.stat()["failed_reads"], 0);
}
