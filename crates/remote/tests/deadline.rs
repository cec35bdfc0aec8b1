//! Servers that answer too slowly or too much: a call ends by its deadline, within the memory of an answer.
//! A program of its own: the peak of memory that it judges is the process's.

mod support;

use std::time::{Duration, Instant};

use memfold_remote::Options;
use memfold_swap::{RemoteError, ScanPolicy, Scratch};
use memfold_testing::store::{Passing, Proxy, StoreServer};
use support::{World, certificates, folder, options, tls_server};

/// A call of 2 s and the look for other servers after it, on busy CPUs. An answer of a byte per second takes
/// longer.
const LONGEST_CALL: Duration = Duration::from_secs(10);

/// Pages that are sent in one call, the answer to which has more bytes than `LONGEST_CALL` has seconds.
const PAGES: u64 = 64;

/// Sends the pages once. Returns how long that took.
fn send_once(world: &World) -> Duration {
    let policy = ScanPolicy {
        recompress: None,
        write_back: Some(1),
    };
    let mut scratch = Scratch::new();
    let began = Instant::now();
    world.space.scan(policy, usize::MAX, &mut scratch);
    world.space.scan(policy, usize::MAX, &mut scratch);
    began.elapsed()
}

/// Has a call to the store end, which changes its answers this way, with all pages kept.
#[track_caller]
fn assert_calls_end(world: &mut World, proxy: &Proxy, passing: Passing) {
    let usage = world.store.tier().usage();
    let pages = world.space.usage().remote_pages;
    proxy.set(passing);
    world.store_more(PAGES);
    let took = send_once(world);
    assert!(took < LONGEST_CALL, "{passing:?}: a call took {took:?}");
    assert_eq!(
        world.space.usage().remote_pages,
        pages,
        "none is acknowledged"
    );
    let after = world.store.tier().usage();
    assert!(after.store_failures > usage.store_failures);
    let trouble = after.trouble;
    assert!(
        matches!(trouble, Some(RemoteError::Unavailable(_))),
        "{passing:?}: {trouble:?}"
    );
    // A read's call ends, too, and the pages are there once the store is well. The server is left alone for at
    // most a second before.
    std::thread::sleep(Duration::from_millis(1500));
    let began = Instant::now();
    world
        .space
        .prefetch(world.stored[..16].iter().map(|one| one.0));
    let took = began.elapsed();
    assert!(took < LONGEST_CALL, "{passing:?}: a read took {took:?}");
    proxy.set(Passing::Free);
    world.assert_all_right();
    world.send_all();
    world.assert_all_right();
}

/// The most memory that this process has had, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    kilobytes
        .expect("the peak")
        .trim()
        .parse::<u64>()
        .expect("a number")
        << 10
}

/// All in one test: the peak is the process's.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn calls_end_in_time_and_in_little_memory() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    let proxy = Proxy::to(server.port);
    let mut world = World::new(&options(proxy.port), PAGES);
    world.send_all();
    assert_calls_end(&mut world, &proxy, Passing::Dripping);
    let before = peak();
    assert_calls_end(&mut world, &proxy, Passing::Huge);
    let more = peak() - before;
    assert!(more < 64 << 20, "an answer of 512 MiB took {more} bytes");

    certificates(folder.path());
    let server = tls_server(folder.path());
    let proxy = Proxy::to(server.port);
    let address = format!("valkeys://127.0.0.1:{}", proxy.port);
    let mut options = Options::new(address.parse().unwrap());
    options.patience = Duration::from_secs(20);
    options.ca_certificates = Some(std::fs::read(folder.path().join("ca.pem")).unwrap());
    let mut world = World::new(&options, PAGES);
    world.send_all();
    assert_calls_end(&mut world, &proxy, Passing::Dripping);
}
