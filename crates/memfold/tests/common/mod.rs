//! What the tests of regions share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file compiles this, and uses a part"
)]

use memfold::{Memfold, MemfoldBuilder, Mode};

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;

/// The modes to be tested: all of them, on a host that is fit for the tests.
pub fn modes() -> Vec<Mode> {
    vec![Mode::Signal, Mode::Thread, Mode::Protection]
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
