//! What the tests of all crates share: how a test is left out, random numbers, fuzz inputs, lists of
//! files.

pub mod store;

use std::io::Write;
use std::path::{Path, PathBuf};

/// Reports that the running test, or a part of it, is left out for want of `missing`, past libtest's
/// capture of output.
///
/// # Panics
/// If `CI=true`: no test may be left out there.
#[track_caller]
pub fn skip(missing: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{test} needs {missing}, and CI=true allows no test to be skipped"
    );
    let line = format!("\nSKIPPED {test}: needs {missing}\n");
    std::io::stderr()
        .write_all(line.as_bytes())
        .expect("stderr");
}

/// Whether this process is root's.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The signals that the calling thread blocks, as the kernel has the set: bit n − 1 is signal n.
///
/// # Panics
/// If `/proc` does not show it.
#[must_use]
pub fn blocked_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("a thread's status");
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let mask = mask.expect("a line with the mask");
    u64::from_str_radix(mask.trim(), 16).expect("a mask")
}

/// Pseudo-random numbers (xorshift64*) that are the same in every run.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Any seed will do.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not begin alike, and zero has no successor.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 64 bits.
    pub fn next_word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number less than `bound`.
    ///
    /// # Panics
    /// If `bound` is zero.
    pub fn below(&mut self, bound: usize) -> usize {
        ((self.next_word() >> 16) % bound as u64) as usize
    }
}

/// The files below a folder whose names end in `ending`, in order.
///
/// # Panics
/// If a folder cannot be read.
#[must_use]
pub fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.expect("an entry of the folder").path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Runs a fuzz target on all of its corpus (`fuzz/corpus/TARGET`), and on random bytes.
///
/// # Panics
/// If the corpus is empty or cannot be read, and where the target does.
pub fn replay(target: &str, run: fn(&[u8])) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
    let inputs = std::fs::read_dir(format!("{folder}{target}")).expect("the corpus");
    let mut count = 0;
    for input in inputs {
        run(&std::fs::read(input.expect("an input").path()).expect("its bytes"));
        count += 1;
    }
    assert!(count > 0, "the corpus of {target} is empty");
    let mut random = Random::new(1);
    for length in 0..500 {
        let bytes: Vec<u8> = (0..length)
            .map(|_| (random.next_word() >> 32) as u8)
            .collect();
        run(&bytes);
    }
}
