//! When the kernel has no memory or addresses to give, calls fail with an error, and existing regions keep
//! working. One test, as it limits the whole process.

mod common;

use allocator_api2::alloc::{Allocator, Layout};
use common::{MIB, PAGE, builder, fill_page, modes, verify_page};
use memfold::{Error, Region};

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

#[test]
fn calls_fail_where_the_system_has_nothing_to_give() {
    for mode in modes() {
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
