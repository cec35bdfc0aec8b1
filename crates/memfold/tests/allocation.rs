//! When the kernel has no memory or addresses to give, calls fail with an error, and existing regions keep
//! working. One test, as it limits the whole process.

mod common;

use allocator_api2::alloc::{Allocator, Layout};
use common::{MIB, PAGE, builder, fill_page, forked, modes, verify_page};
use memfold::{Algorithm, Error, Mode, Region};
use std::time::{Duration, Instant};

/// Limits the addresses of the process to what it has and `more` bytes. Returns the old limit.
fn limit_addresses(more: usize) -> libc::rlimit {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: fills and reads live structures.
    unsafe {
        let mut before: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut before), 0);
        let now = libc::rlimit {
            rlim_cur: (pages * PAGE + more) as u64,
            ..before
        };
        assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const now), 0);
        before
    }
}

fn restore(limit: &libc::rlimit) {
    // SAFETY: a live structure.
    unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_AS, limit), 0) };
}

fn verify(region: &Region) {
    for (number, page) in region.chunks_exact(PAGE).enumerate() {
        verify_page(page, number as u64, 5);
    }
}

/// Takes what the allocator has left, so that an allocation of some 64 KiB fails.
fn exhaust() {
    const BLOCK: usize = 16 << 10;
    // SAFETY: what is allocated is left to the process.
    let mut blocks = (0..1024 * MIB / BLOCK).map(|_| unsafe { libc::malloc(BLOCK) });
    assert!(
        blocks.any(<*mut libc::c_void>::is_null),
        "there is no limit"
    );
}

/// Waits until each other thread of this process sleeps: one that has just been started needs memory of its own first.
fn await_threads() {
    let is_asleep = |thread: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
        // The calling thread is one that runs.
        stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('S'))
    };
    let began = Instant::now();
    let awake = || std::fs::read_dir("/proc/self/task").unwrap().map(is_asleep);
    while awake().filter(|is_asleep| !is_asleep).count() > 1 {
        assert!(began.elapsed() < Duration::from_secs(10), "threads run on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a fault needs is there before it: here, what decompresses Zstandard, in workers that never did.
fn a_fault_needs_no_memory(mode: Mode) {
    let status = forked(|| {
        // Of LZ4 first: the workers are those of the process.
        let _first = builder(mode).limit(64 * MIB as u64).build().unwrap();
        let memfold = builder(mode)
            .limit(64 * MIB as u64)
            .algorithm(Algorithm::Zstd)
            .build()
            .unwrap();
        let mut region = memfold.map(MIB).unwrap();
        for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 5);
        }
        region.page_out(..).unwrap();
        await_threads();
        limit_addresses(0);
        exhaust();
        let mut pages = region.chunks_exact(PAGE);
        i32::from(!pages.all(|page| page[24..32] == 3_u64.to_ne_bytes()))
    });
    assert_eq!(status, 0, "{mode}: {status:#x}");
}

#[test]
fn calls_fail_where_the_system_has_nothing_to_give() {
    // AddressSanitizer's allocator reserves its addresses, so that no limit exhausts them.
    let is_sanitized = std::env::var_os("ASAN_OPTIONS").is_some();
    for mode in modes() {
        if !is_sanitized {
            a_fault_needs_no_memory(mode);
        }
        let memfold = builder(mode)
            .resident_limit(4 * MIB as u64)
            .build()
            .unwrap();
        let allocator = memfold.allocator();
        let mut region = memfold.map(8 * MIB).unwrap();
        for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 5);
        }
        let before = limit_addresses(64 * MIB);
        let refused = memfold.map(256 * MIB);
        let large = allocator.allocate(Layout::from_size_align(256 * MIB, 8).unwrap());
        let second = builder(mode).resident_limit(4 * MIB as u64).build();
        // Swapping goes on all the while.
        verify(&region);
        let out = region.page_out(..);
        verify(&region);
        restore(&before);
        assert!(
            matches!(refused, Err(Error::System { .. })),
            "{mode}: {refused:?}"
        );
        assert!(large.is_err(), "{mode}");
        assert!(
            matches!(second, Err(Error::System { .. } | Error::Pool(_))),
            "{mode}: {second:?}"
        );
        assert!(out.unwrap() > 0);
        // Nothing that was refused is left behind.
        assert_eq!(memfold.stats().mapped_bytes, 8 * MIB as u64);
        assert!(memfold.map(256 * MIB).is_ok());
        assert!(builder(mode).resident_limit(4 * MIB as u64).build().is_ok());
    }
}
