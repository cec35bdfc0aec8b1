//! Regions whose pages are in a store on other machines.
#![cfg(feature = "remote")]
#![allow(missing_docs, reason = "tests")]

use memfold::{Memfold, Mode, Password, Region, RemoteOptions, Stats};
use memfold_testing::store::{StoreServer, has_store, store_programs};
use memfold_testing::{Random, skip};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn folder() -> Option<tempfile::TempDir> {
    if !has_store() {
        skip(&store_programs().join(" and "));
        return None;
    }
    Some(tempfile::tempdir().unwrap())
}

/// The store's port, for a test that runs in a process of its own.
const PORT: &str = "MEMFOLD_TEST_STORE_PORT";

/// Runs a test in a process of its own.
fn alone(test: &str, server: &StoreServer) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(PORT, server.port.to_string())
        .output()
        .unwrap()
}

fn options_of(port: impl std::fmt::Display) -> RemoteOptions {
    let address = format!("valkey://127.0.0.1:{port}");
    RemoteOptions::new(address.parse().unwrap())
}

fn options(server: &StoreServer) -> RemoteOptions {
    let mut options = options_of(server.port);
    options.patience = Duration::from_secs(20);
    options
}

/// Of a page: half of it compresses.
fn word(page: usize, index: usize) -> u64 {
    let seed = (page * 512 + index) as u64;
    if index < 256 {
        Random::new(seed).next_word()
    } else {
        page as u64
    }
}

fn fill(region: &mut Region) {
    for (page, bytes) in region.chunks_exact_mut(PAGE).enumerate() {
        for (index, place) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *place = word(page, index).to_le_bytes();
        }
    }
}

#[track_caller]
fn assert_page(region: &[u8], page: usize) {
    let bytes = &region[page * PAGE..(page + 1) * PAGE];
    for (index, found) in bytes.as_chunks::<8>().0.iter().enumerate() {
        assert_eq!(u64::from_le_bytes(*found), word(page, index), "page {page}");
    }
}

/// The modes that this host allows.
fn modes() -> Vec<Mode> {
    let is_allowed = |mode: &Mode| {
        let built = Memfold::builder().limit(16 << 20).mode(*mode).build();
        if let Err(error) = &built {
            skip(&format!("{mode} mode: {error}"));
        }
        built.is_ok()
    };
    [Mode::Signal, Mode::Thread]
        .into_iter()
        .filter(is_allowed)
        .collect()
}

/// Has pages go to a store and come back in every thread. Returns how many loads failed.
fn use_a_store(folder: &Path, mode: Mode) -> u64 {
    let server = StoreServer::start(folder, &["--requirepass", "x"]);
    let mut options = options(&server);
    options.password = Some(Password::new("x".to_owned()));
    let memfold = Memfold::builder()
        .limit(24 << 20)
        .mode(mode)
        .remote(options)
        .build()
        .unwrap();
    let mut region = memfold.map(64 * MIB).unwrap();
    fill(&mut region);
    let pages = region.len() / PAGE;
    let shared = &region[..];
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for round in 0..pages / 2 {
                    // At random, and all in order.
                    assert_page(shared, random.below(pages));
                    assert_page(shared, (round + thread as usize * pages / 4) % pages);
                }
            });
        }
    });
    for page in 0..pages {
        assert_page(&region, page);
    }
    let usage = memfold.remote_usage().unwrap();
    assert!(
        usage.pages_out > 2000 && usage.pages_in > 2000,
        "{mode}: {usage:?}"
    );
    assert_eq!(usage.lost_pages, 0, "{mode}: {usage:?}");
    let failures = usage.load_failures;
    // To pin pages brings them back, too.
    let pinned = region.pin(0..16 * PAGE).unwrap();
    assert_page(&pinned, 15);
    drop(pinned);
    assert_ne!(server.ask(&["DBSIZE"]), "0");
    let stats = stats_between(&memfold);
    let waited = 1000..=stats.faults_swap_in.min(stats.remote_pages_in);
    assert!(waited.contains(&stats.remote_faults), "{mode}: {stats:?}");
    assert!(
        (1000..=stats.stored_pages).contains(&stats.remote_pages),
        "{mode}: {stats:?}"
    );
    // Half of each page compresses.
    let each = stats.remote_bytes / stats.remote_pages;
    assert!((2000..2500).contains(&each), "{mode}: {stats:?}");
    drop(memfold);
    assert_page(&region, 5);
    drop(region);
    assert_eq!(server.ask(&["DBSIZE"]), "0", "a clean end leaves nothing");
    failures
}

/// Statistics of a moment at which no page goes or comes; those of the store are the same.
fn stats_between(memfold: &Memfold) -> Stats {
    let moved = || {
        let usage = memfold.remote_usage().unwrap();
        (usage.pages_out, usage.pages_in)
    };
    for _ in 0..1000 {
        let before = moved();
        let stats = memfold.stats();
        if moved() == before {
            assert_eq!((stats.remote_pages_out, stats.remote_pages_in), before);
            return stats;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("pages go and come for ever");
}

#[test]
fn pages_go_to_a_store_and_come_back_in_every_thread() {
    let Some(folder) = folder() else { return };
    for mode in modes() {
        // A server without a CPU does not answer in time.
        let is_any_without = (0..3).any(|_| use_a_store(folder.path(), mode) == 0);
        assert!(is_any_without, "{mode}: loads fail");
    }
}

#[test]
fn a_store_that_hangs_delays_and_one_that_is_full_keeps_pages_here() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    for mode in modes() {
        let memfold = Memfold::builder()
            .limit(24 << 20)
            .mode(mode)
            .remote(options(&server))
            .build();
        let memfold = memfold.unwrap();
        let mut region = memfold.map(64 * MIB).unwrap();
        fill(&mut region);
        let pages = region.len() / PAGE;
        server.pause(true);
        let (mut has_waited, mut waiting) = (false, 0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (0..pages).for_each(|page| assert_page(&region, page)));
            // It counts as waiting once a call has failed.
            let began = Instant::now();
            while waiting == 0 && began.elapsed() < Duration::from_secs(15) {
                std::thread::sleep(Duration::from_millis(10));
                waiting = memfold.stats().remote_waiting;
            }
            has_waited = !reader.is_finished();
            server.pause(false);
        });
        assert!(has_waited, "{mode}: pages were not there");
        assert!(waiting > 0, "{mode}: what is waited for is counted");
        assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "2mb"]), "OK");
        let mut more = memfold.map(16 * MIB).unwrap();
        fill(&mut more);
        (0..more.len() / PAGE).for_each(|page| assert_page(&more, page));
        assert_eq!(server.ask(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
        (0..pages).for_each(|page| assert_page(&region, page));
        let stats = memfold.stats();
        assert!(stats.remote_failures > 0, "{mode}: it was full: {stats:?}");
        assert_eq!((stats.remote_lost_pages, stats.remote_waiting), (0, 0));
    }
}

#[test]
fn a_program_whose_pages_are_lost_is_aborted() {
    let Some(folder) = folder() else { return };
    if let Ok(port) = std::env::var(PORT) {
        let options = options_of(&port);
        let memfold = Memfold::builder()
            .limit(24 << 20)
            .remote(options)
            .build()
            .unwrap();
        let mut region = memfold.map(64 * MIB).unwrap();
        fill(&mut region);
        let address = ["-p", &port, "FLUSHALL"];
        let flushed = Command::new(store_programs()[1]).args(address).status();
        assert!(flushed.unwrap().success());
        (0..region.len() / PAGE).for_each(|page| assert_page(&region, page));
        return;
    }
    if modes().is_empty() {
        return;
    }
    let server = StoreServer::start(folder.path(), &[]);
    let output = alone("a_program_whose_pages_are_lost_is_aborted", &server);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(6), "{errors}");
    assert!(
        errors.contains("cannot swap in a page of a region"),
        "{errors}"
    );
}

/// The kernel gives a process's signal to any thread that does not block it.
#[test]
fn threads_of_a_store_leave_signals_to_the_program() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    for mode in modes() {
        let builder = Memfold::builder().limit(24 << 20).mode(mode);
        let _memfold = builder.remote(options(&server)).build().unwrap();
        let mut names = Vec::new();
        for thread in std::fs::read_dir("/proc/self/task").unwrap() {
            let path = thread.unwrap().path().join("status");
            // It may have ended.
            let status = std::fs::read_to_string(path).unwrap_or_default();
            let value = |name| {
                let mut lines = status.lines();
                lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
            };
            let (Some(name), Some(blocked)) = (value("Name:"), value("SigBlk:")) else {
                continue;
            };
            // (This process's name begins with "remote-".)
            if name.starts_with("memfold-") || name == "remote" {
                let blocked = u64::from_str_radix(&blocked, 16).unwrap();
                for signal in [libc::SIGALRM, libc::SIGCHLD, libc::SIGINT, libc::SIGTERM] {
                    assert_ne!(blocked >> (signal - 1) & 1, 0, "{name}: {signal}");
                }
                names.push(name);
            }
        }
        assert!(names.iter().any(|name| name == "remote"), "{names:?}");
    }
}

/// The numbers of closed descriptors are the program's next files: these are not touched, and not closed.
#[test]
fn reused_descriptors_are_left_alone() {
    let Some(folder) = folder() else { return };
    if let Ok(port) = std::env::var(PORT) {
        return reuse_descriptors(options_of(port));
    }
    if modes().is_empty() {
        return;
    }
    let server = StoreServer::start(folder.path(), &[]);
    let output = alone("reused_descriptors_are_left_alone", &server);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(server.ask(&["DBSIZE"]), "0", "{errors}");
}

fn reuse_descriptors(options: RemoteOptions) {
    let builder = Memfold::builder().limit(24 << 20).mode(Mode::Signal);
    let memfold = builder.remote(options).build().unwrap();
    let mut region = memfold.map(64 * MIB).unwrap();
    fill(&mut region);
    // Nothing is sent once the pool has its share.
    let out = || memfold.remote_usage().unwrap().pages_out;
    let mut before = 0;
    while out() == 0 || out() != before {
        before = out();
        std::thread::sleep(Duration::from_millis(200));
    }
    // SAFETY: numbers only; what is closed is memfold's.
    unsafe { libc::close_range(3, u32::MAX, 0) };
    let bytes = [0xff; PAGE];
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let numbers = file.as_raw_fd()..64;
    for number in numbers.clone() {
        // SAFETY: numbers only; all but the file's own are closed.
        unsafe { libc::dup2(file.as_raw_fd(), number) };
    }
    // Has the store remove them, by another connection.
    drop((region, memfold));
    // SAFETY: numbers only.
    let is_open = |number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    assert!(numbers.into_iter().all(is_open), "closed");
    assert_eq!(file.metadata().unwrap().len(), PAGE as u64);
    let mut found = [0; PAGE];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, bytes);
}

#[test]
fn what_cannot_work_with_a_store_is_refused() {
    let Some(folder) = folder() else { return };
    let server = StoreServer::start(folder.path(), &[]);
    let refused = [
        Memfold::builder()
            .limit(24 << 20)
            .mode(Mode::Protection)
            .remote(options(&server)),
        Memfold::builder()
            .resident_limit(24 << 20)
            .remote(options(&server)),
        Memfold::builder()
            .limit(24 << 20)
            .remote(RemoteOptions::new("valkey://127.0.0.1:1".parse().unwrap())),
    ];
    for builder in refused {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, memfold::Error::Remote(_)), "{error}");
    }
    assert_eq!(server.ask(&["DBSIZE"]), "0");
}
