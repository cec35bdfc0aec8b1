//! Recorded compressed sizes of real programs' pages.
//!
//! A trace holds the compressed size of each page in bytes, in address order, as little-endian
//! 16-bit integers. Same-filled pages are left out, as a swap space stores nothing for them; an
//! incompressible page counts as `PAGE_SIZE`.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    os::unix::fs::FileExt,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use memfold_swap::Algorithm;
use zsmalloc::PAGE_SIZE;

use crate::Options;

/// Records the process `--pid` into the file `--output`.
pub fn run(options: &Options) -> Result<()> {
    let given = |name: &str| {
        let value = options.value(name);
        value.with_context(|| format!("--{name} is missing"))
    };
    let pid = given("pid")?;
    let process = pid
        .parse()
        .with_context(|| format!("--pid takes a PID, not {pid:?}"))?;
    let algorithm = given("algo")?.parse()?;
    let output = Path::new(given("output")?);
    record(process, algorithm, options.number("pages", 16_384)?, output)
        .with_context(|| format!("cannot record process {pid}"))
}

/// The compressed sizes of a program's pages under one compressor.
#[derive(Debug, Clone, Copy)]
pub struct Trace {
    /// `PROGRAM-COMPRESSOR`.
    pub name: &'static str,
    bytes: &'static [u8],
}

macro_rules! traces {
    ($($name:literal),* $(,)?) => {
        /// The traces in `crates/lab/traces`.
        pub const TRACES: &[Trace] = &[$(Trace {
            name: $name,
            bytes: include_bytes!(concat!("../traces/", $name, ".sizes")),
        }),*];
    };
}

traces!(
    "compiler-lz4",
    "compiler-zstd",
    "cpython-lz4",
    "cpython-zstd",
    "node-lz4",
    "node-zstd",
    "redis-lz4",
    "redis-zstd",
);

impl Trace {
    /// The trace of that name.
    pub fn find(name: &str) -> Result<Self> {
        TRACES
            .iter()
            .copied()
            .find(|trace| trace.name == name)
            .with_context(|| format!("unknown trace {name:?}"))
    }

    /// Sizes in bytes, in address order.
    pub fn sizes(&self) -> Vec<usize> {
        self.bytes
            .chunks_exact(2)
            .map(|pair| usize::from(u16::from_le_bytes([pair[0], pair[1]])))
            .collect()
    }
}

/// All lz4 traces, interleaved in runs of 512 pages.
pub fn mixed_lz4() -> Vec<usize> {
    const RUN: usize = 512;
    let traces: Vec<Vec<usize>> = TRACES
        .iter()
        .filter(|trace| trace.name.ends_with("-lz4"))
        .map(Trace::sizes)
        .collect();
    let longest = traces.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest)
        .step_by(RUN)
        .flat_map(|start| {
            traces
                .iter()
                .flat_map(move |trace| trace.iter().skip(start).take(RUN))
        })
        .copied()
        .collect()
}

/// The compressed size of `page` in bytes; `PAGE_SIZE` if it is incompressible.
///
/// # Panics
/// On an algorithm that there are no traces of.
pub fn compressed_size(algorithm: Algorithm, page: &[u8]) -> usize {
    let mut output = [0_u8; PAGE_SIZE];
    let size = match algorithm {
        Algorithm::Lz4 => {
            // SAFETY: both buffers are valid for the lengths given with them.
            let size = unsafe {
                lz4_sys::LZ4_compress_default(
                    page.as_ptr().cast(),
                    output.as_mut_ptr().cast(),
                    page.len() as i32,
                    output.len() as i32,
                )
            };
            usize::try_from(size).unwrap_or(0)
        }
        Algorithm::Zstd => zstd_safe::compress(&mut output[..], page, 1).unwrap_or(0),
        other => panic!("no traces of {other}"),
    };
    if size == 0 {
        PAGE_SIZE
    } else {
        size.min(PAGE_SIZE)
    }
}

/// Writes to `output` the compressed sizes of a process's present private writable pages: at most
/// `at_most` of them, sampled evenly in runs of 64.
fn record(pid: u32, algorithm: Algorithm, at_most: usize, output: &Path) -> Result<()> {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages: Vec<u64> = Vec::new();
    for line in maps.lines() {
        let line = line?;
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(flags)) = (fields.next(), fields.next()) else {
            continue;
        };
        let file = fields.nth(3).unwrap_or("");
        if !flags.starts_with("rw-p") || file.starts_with('/') || file == "[vvar]" {
            continue;
        }
        let (start, end) = range
            .split_once('-')
            .with_context(|| format!("cannot parse /proc/{pid}/maps: {line:?}"))?;
        let (start, end) = (
            u64::from_str_radix(start, 16)?,
            u64::from_str_radix(end, 16)?,
        );
        for address in (start..end).step_by(PAGE_SIZE) {
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, address / PAGE_SIZE as u64 * 8)?;
            if u64::from_le_bytes(entry) >> 63 == 1 {
                pages.push(address);
            }
        }
    }
    ensure!(
        !pages.is_empty(),
        "process {pid} has no private writable pages present"
    );
    let mut sizes = Vec::new();
    let runs: Vec<&[u64]> = pages.chunks(64).collect();
    let step = (pages.len() / at_most.max(1)).max(1);
    for &address in runs.into_iter().step_by(step).flatten() {
        let mut page = [0; PAGE_SIZE];
        // The page may have been unmapped meanwhile.
        if memory.read_exact_at(&mut page, address).is_err() || is_same_filled(&page) {
            continue;
        }
        sizes.extend((compressed_size(algorithm, &page) as u16).to_le_bytes());
    }
    sizes.truncate(at_most * 2);
    std::fs::write(output, &sizes)?;
    println!(
        "{}: {} of {} pages",
        output.display(),
        sizes.len() / 2,
        pages.len()
    );
    Ok(())
}

fn is_same_filled(page: &[u8]) -> bool {
    page.chunks_exact(8).all(|word| word == &page[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gain that recompression relies on: zstd needs at most 5/7 of lz4's bytes.
    #[test]
    fn zstd_is_denser_than_lz4_on_every_recorded_program() {
        for program in ["cpython", "node", "redis", "compiler"] {
            let of = |algorithm: &str| {
                let sizes = Trace::find(&format!("{program}-{algorithm}"));
                let sizes = sizes.unwrap().sizes();
                sizes.iter().sum::<usize>() as f64 / sizes.len() as f64
            };
            let gain = of("lz4") / of("zstd");
            assert!(
                gain >= 1.4,
                "{program}: lz4 takes {gain:.2} times the bytes"
            );
        }
    }

    #[test]
    fn every_trace_is_valid() {
        for trace in TRACES {
            let sizes = trace.sizes();
            assert!(
                sizes.len() > 1000,
                "{} has {} pages",
                trace.name,
                sizes.len()
            );
            assert!(sizes.iter().all(|size| (1..=PAGE_SIZE).contains(size)));
        }
        assert!(mixed_lz4().len() > 4000);
    }

    #[test]
    fn compressors_compress() {
        let text: Vec<u8> = b"compressed swap in user space "
            .iter()
            .copied()
            .cycle()
            .take(PAGE_SIZE)
            .collect();
        for &algorithm in Algorithm::ALL {
            assert!((1..400).contains(&compressed_size(algorithm, &text)));
        }
        assert!(is_same_filled(&[7; PAGE_SIZE]) && !is_same_filled(&text));
    }
}
