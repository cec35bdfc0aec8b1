//! Disks on a store that hangs.

use crate::raw_client::RawClient;
use crate::support::{MIB, Served, has};
use memfold_testing::Random;
use memfold_testing::store::{Passing, Proxy, StoreServer, store_programs};
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

const PIECE: usize = MIB / 4;
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
        if !has(&store_programs()) {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let server = StoreServer::start(folder.path(), &[]);
        let proxy = Proxy::to(server.port);
        let remote = format!("valkey://127.0.0.1:{}", proxy.port);
        let served = Served::start(&["--size", "64M", "--limit", "8M", "--remote", &remote]);
        Some(Remote {
            server,
            proxy,
            served,
            _folder: folder,
        })
    }
}

/// Writes noise to these pieces of the disk until one fails; its error number, or 0.
fn write(client: &mut RawClient, pieces: std::ops::Range<u64>) -> u32 {
    let mut random = Random::new(pieces.start);
    let mut outcomes = pieces.map(|piece| {
        let noise = (0..PIECE / 8).flat_map(|_| random.next_word().to_le_bytes());
        client.write(piece * PIECE as u64, &noise.collect::<Vec<u8>>())
    });
    outcomes.find(|error| *error != 0).unwrap_or(0)
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
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    remote.served.signal(Signal::SIGTERM);
    let ended_by = remote.served.wait_for_signal();
    let took = began.elapsed();
    assert_eq!(ended_by, Some(Signal::SIGTERM as i32));
    assert!(took < Duration::from_secs(1), "{took:?}");
}
