//! An array of 256 MiB in 128 MiB of memory, without userfaultfd, capabilities or root.
//!
//! ```sh
//! cargo run --release -p memfold --example unprivileged -- [--megabytes 256] [--limit 128]
//! ```
//!
//! Every word is written once and then read back twice, in order and in a random order of pages.
//! Exit status 1: a word was wrong, or the limit was exceeded.

mod common;

use memfold::{Memfold, Mode};
use std::process::ExitCode;
use std::time::Instant;

const WORDS_PER_PAGE: usize = 512;

/// What page `page` holds: two random words in eight, the others small numbers. LZ4 compresses that to
/// about a third.
fn word(page: usize, index: usize) -> u64 {
    if index % 8 < 2 {
        let number = (page * WORDS_PER_PAGE + index) as u64;
        let mixed = (number ^ number >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    } else {
        page as u64
    }
}

/// Reads a page back; `false` if any word of it is wrong.
fn is_right(words: &[u64], page: usize) -> bool {
    let words = &words[page * WORDS_PER_PAGE..][..WORDS_PER_PAGE];
    let mut indexed = words.iter().enumerate();
    indexed.all(|(index, found)| *found == word(page, index))
}

fn main() -> Result<ExitCode, memfold::Error> {
    let [megabytes, limit] = common::numbers([("--megabytes", 256), ("--limit", 128)]);
    let memfold = Memfold::builder()
        .limit((limit as u64) << 20)
        .mode(Mode::Protection)
        .build()?;
    let mut region = memfold.map(megabytes << 20)?;
    let pages = (megabytes << 20) / (WORDS_PER_PAGE * size_of::<u64>());

    let began = Instant::now();
    let words = region.view_mut::<u64>();
    for (page, words) in words.chunks_exact_mut(WORDS_PER_PAGE).enumerate() {
        for (index, place) in words.iter_mut().enumerate() {
            *place = word(page, index);
        }
    }
    println!(
        "wrote {megabytes} MiB in {:.1} s under a limit of {limit} MiB ({} mode)",
        began.elapsed().as_secs_f64(),
        memfold.mode()
    );

    let began = Instant::now();
    let words = region.view::<u64>();
    let mut wrong = (0..pages).filter(|page| !is_right(words, *page)).count();
    // A step without a factor in common with the number of pages visits each once.
    let step = (1..=pages)
        .map(|n| pages / 3 + n)
        .find(|step| gcd(*step, pages) == 1);
    let step = step.expect("there is one below 2 × pages");
    wrong += (0..pages)
        .filter(|n| !is_right(words, n * step % pages))
        .count();
    println!(
        "read every page back twice, in order and in random order, in {:.1} s: {wrong} wrong",
        began.elapsed().as_secs_f64()
    );

    let stats = memfold.stats();
    println!(
        "resident: at most {} MiB; compressed pool: {} MiB; pages out: {}, in: {}",
        stats.peak_resident_bytes >> 20,
        stats.pool_bytes >> 20,
        stats.pages_out,
        stats.pages_in
    );
    if wrong > 0 || stats.over_limit_pages > 0 {
        eprintln!(
            "unprivileged: {wrong} pages are wrong, {} pages over the limit",
            stats.over_limit_pages
        );
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
