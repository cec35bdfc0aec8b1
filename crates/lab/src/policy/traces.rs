//! Page traces: recorded ones in `crates/lab/traces/*.pages`, and generated ones.
//!
//! A file is one zstd frame of LEB128 integers: the number of pages, the number of accesses, then for each
//! access the difference to the page before, zigzag-coded. Pages are numbered by address, without gaps.

use super::queue::Page;
use crate::random::Random;
use anyhow::{Context, Result, bail, ensure};
use std::{borrow::Cow, io::Read};

/// Accesses to pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Number of pages; each is accessed.
    pub pages: usize,
    /// The pages, in the order of the accesses.
    pub accesses: Vec<Page>,
}

macro_rules! recorded {
    ($($name:literal),* $(,)?) => {
        /// The recorded traces.
        const RECORDED: &[(&str, &[u8])] = &[$(
            ($name, include_bytes!(concat!("../../traces/", $name, ".pages"))),
        )*];
    };
}

recorded!("cpython", "sqlite", "cc1plus", "luajit", "ocaml", "sort");

/// A generator of accesses.
type Generator = fn() -> Vec<Page>;

const GENERATED: &[(&str, Generator)] = &[
    ("cycle", cycle),
    ("zipf", zipf),
    ("scan", scan),
    ("phases", phases),
];

/// Pages of the generated traces.
const PAGES: usize = 5003;

/// The names of all traces.
pub fn names() -> impl Iterator<Item = &'static str> {
    let recorded = RECORDED.iter().map(|(name, _)| *name);
    recorded.chain(GENERATED.iter().map(|(name, _)| *name))
}

impl Trace {
    /// The trace of that name, or the one in that file.
    pub fn find(name: &str) -> Result<Self> {
        if let Some((name, bytes)) = RECORDED.iter().find(|(known, _)| *known == name) {
            return Self::decode(*name, bytes);
        }
        if let Some((name, generate)) = GENERATED.iter().find(|(known, _)| *known == name) {
            let addresses: Vec<u64> = generate().into_iter().map(u64::from).collect();
            return Ok(Self::new(*name, &addresses));
        }
        let all: Vec<&str> = names().collect();
        let bytes = std::fs::read(name)
            .with_context(|| format!("{name:?} is neither a file nor of {}", all.join(",")))?;
        Self::decode(name.to_owned(), &bytes)
    }

    /// Numbers the pages by address, without gaps.
    pub fn new(name: impl Into<Cow<'static, str>>, addresses: &[u64]) -> Self {
        let mut pages = addresses.to_vec();
        pages.sort_unstable();
        pages.dedup();
        let rank = |page: &u64| pages.partition_point(|other| other < page) as Page;
        Self {
            name: name.into(),
            pages: pages.len(),
            accesses: addresses.iter().map(rank).collect(),
        }
    }

    /// The bytes of a file.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut plain = Vec::new();
        put(&mut plain, self.pages as u64);
        put(&mut plain, self.accesses.len() as u64);
        let mut last = 0;
        for &page in &self.accesses {
            let difference = i64::from(page) - last;
            last = i64::from(page);
            put(&mut plain, ((difference << 1) ^ (difference >> 63)) as u64);
        }
        let mut packed = vec![0; zstd_safe::compress_bound(plain.len())];
        let size = zstd_safe::compress(&mut packed[..], &plain, 22).map_err(zstd_error)?;
        packed.truncate(size);
        Ok(packed)
    }

    /// The inverse of [`Trace::encode`].
    pub fn decode(name: impl Into<Cow<'static, str>>, packed: &[u8]) -> Result<Self> {
        let name = name.into();
        let content = || -> Result<(usize, Vec<Page>)> {
            let size = zstd_safe::get_frame_content_size(packed).ok().flatten();
            let size = size.context("not a page trace")?;
            ensure!(size < 1 << 30, "{size} bytes are too many");
            let mut plain = vec![0; size as usize];
            zstd_safe::decompress(&mut plain[..], packed).map_err(zstd_error)?;
            let mut rest = plain.as_slice();
            let pages = take(&mut rest)?;
            let count = take(&mut rest)?;
            let mut accesses = Vec::new();
            let mut page = 0_i64;
            for _ in 0..count {
                let coded = take(&mut rest)?;
                page = page.wrapping_add((coded >> 1) as i64 ^ -((coded & 1) as i64));
                let known = u64::try_from(page).is_ok_and(|page| page < pages);
                ensure!(known, "page {page} of {pages}");
                accesses.push(page as Page);
            }
            ensure!(rest.is_empty(), "{} bytes are left", rest.len());
            Ok((pages as usize, accesses))
        };
        let (pages, accesses) = content().with_context(|| format!("trace {name}"))?;
        Ok(Self {
            name,
            pages,
            accesses,
        })
    }

    /// Reads page numbers as `bench/page-trace.c` writes them.
    pub fn read(name: String, input: &mut dyn Read) -> Result<Self> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes).context("standard input")?;
        let (numbers, rest) = bytes.as_chunks();
        if numbers.is_empty() || !rest.is_empty() {
            bail!(
                "standard input has {} bytes, not 64-bit page numbers",
                bytes.len()
            );
        }
        let numbers: Vec<u64> = numbers.iter().copied().map(u64::from_ne_bytes).collect();
        Ok(Self::new(name, &numbers))
    }
}

fn zstd_error(code: usize) -> anyhow::Error {
    anyhow::anyhow!("zstd: {}", zstd_safe::get_error_name(code))
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().context("the trace is cut off")?;
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(number);
        }
    }
    bail!("an integer is longer than 64 bits")
}

fn lap() -> impl Iterator<Item = Page> {
    0..PAGES as Page
}

/// Twelve ways round all pages.
fn cycle() -> Vec<Page> {
    (0..12).flat_map(|_| lap()).collect()
}

/// A page of a Zipf-like distribution, spread over all pages.
fn skewed(random: &mut Random) -> Page {
    let unit = random.below(1 << 30) as f64 / f64::from(1 << 30);
    let rank = (PAGES as f64).powf(unit) as usize;
    (rank.min(PAGES - 1) * 3571 % PAGES) as Page
}

/// Skewed accesses.
fn zipf() -> Vec<Page> {
    let mut random = Random::new(1);
    let first = lap();
    first
        .chain((0..150_000).map(|_| skewed(&mut random)))
        .collect()
}

/// A scan beside a hot fifth of the pages, which takes seven of ten accesses.
fn scan() -> Vec<Page> {
    let mut random = Random::new(2);
    let hot = PAGES / 5;
    let mut next = (hot..PAGES).cycle();
    let accesses = (0..150_000).map(|_| match (random.below(10), next.clone().next()) {
        (0..3, Some(page)) => {
            next.next();
            page as Page
        }
        _ => random.below(hot) as Page,
    });
    lap().chain(accesses).collect()
}

/// Skewed accesses, ways round, and working sets of three tenths that move, in turn.
fn phases() -> Vec<Page> {
    let mut random = Random::new(3);
    let mut accesses: Vec<Page> = lap().collect();
    let working = PAGES * 3 / 10;
    for phase in 0..9 {
        match phase % 3 {
            0 => accesses.extend((0..25_000).map(|_| skewed(&mut random))),
            1 => accesses.extend((0..5).flat_map(|_| lap())),
            _ => {
                let start = phase * 509 % (PAGES - working);
                accesses.extend((0..25_000).map(|_| (start + random.below(working)) as Page));
            }
        }
    }
    accesses
}
