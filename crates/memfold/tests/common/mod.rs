//! What the tests of regions share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file compiles this, and uses a part"
)]

use memfold::{Memfold, MemfoldBuilder, Mode};

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;

/// Set in the environment, it has engines do without `UFFDIO_MOVE`, as on kernels before Linux 6.8.
pub const WITHOUT_MOVE: &str = "MEMFOLD_WITHOUT_MOVE";

/// The modes to be tested: all of them, on a host that is fit for the tests; but thread mode does not do without
/// `UFFDIO_MOVE`.
pub fn modes() -> Vec<Mode> {
    let mut modes = userfaultfd_modes();
    modes.push(Mode::Protection);
    modes
}

/// Those with a userfaultfd.
pub fn userfaultfd_modes() -> Vec<Mode> {
    if std::env::var_os(WITHOUT_MOVE).is_some() {
        return vec![Mode::Signal];
    }
    vec![Mode::Signal, Mode::Thread]
}

pub fn builder(mode: Mode) -> MemfoldBuilder {
    Memfold::builder().mode(mode)
}

fn word(number: u64, generation: u64, index: u64) -> u64 {
    if index.is_multiple_of(3) {
        index
    } else {
        (number ^ generation << 20 ^ index << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// Fills a page with what only this page of this generation has, half of it compressible.
pub fn fill_page(page: &mut [u8], number: u64, generation: u64) {
    for (index, bytes) in page.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(number, generation, index as u64).to_ne_bytes());
    }
}

pub fn verify_page(page: &[u8], number: u64, generation: u64) {
    for (index, bytes) in page.chunks_exact(8).enumerate() {
        let found = u64::from_ne_bytes(bytes.try_into().unwrap());
        let expected = word(number, generation, index as u64);
        assert_eq!(
            found, expected,
            "page {number}, generation {generation}, word {index}"
        );
    }
}

/// Runs a child that ends by `run`, and returns its wait status.
pub fn forked(run: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs only what is given and exits without destructors.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(run());
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    }
}
