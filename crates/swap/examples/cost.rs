//! What a store and a load cost, page by page, for generated pages and for files of real memory.
//!
//! `cargo run --release -p memfold-swap --example cost -- [FILE…]`: a file is taken as pages one
//! after another, for instance a copy of what `/proc/PID/mem` shows of a heap. With `BLOCKS=1`, sizes
//! and levels of blocks instead.

use std::{sync::Mutex, time::Instant};

use memfold_swap::{
    Algorithm, BlockShape, FileBackend, FileTier, NoopTier, PAGE_SIZE, Page, ScanPolicy, Scratch,
    SwapConfig, SwapSpace, TierKey, TierKind, fill_word,
};
use zsmalloc::HeapSource;

const PAGES: usize = 8192;
const ROUNDS: usize = 5;

/// Pages of repeats and noise that LZ4 compresses about 2.2:1.
fn generated() -> Vec<Page> {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as usize % below
    };
    let mut page = || {
        let mut page = [0_u8; PAGE_SIZE];
        let mut at = 0;
        while at < PAGE_SIZE {
            let length = (8 + next(32)).min(PAGE_SIZE - at);
            let back = if at > 64 && next(100) >= 36 {
                1 + next(at.min(1000))
            } else {
                0
            };
            for index in at..at + length {
                page[index] = if back > 0 {
                    page[index - back]
                } else {
                    next(256) as u8
                };
            }
            at += length;
        }
        page
    };
    (0..PAGES).map(|_| page()).collect()
}

fn pages_of(file: &str) -> std::io::Result<Vec<Page>> {
    let bytes = std::fs::read(file)?;
    let pages = bytes.as_chunks::<PAGE_SIZE>().0.iter();
    Ok(pages
        .filter(|page| fill_word(page).is_none())
        .take(PAGES)
        .copied()
        .collect())
}

/// The shortest time of some rounds for each page, in nanoseconds.
fn fastest(pages: usize, mut round: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        round();
        start.elapsed().as_nanos() as f64 / pages as f64
    };
    (0..ROUNDS).map(time).fold(f64::INFINITY, f64::min)
}

fn measure(what: &str, pages: &[Page], space: &SwapSpace<HeapSource>) {
    let mut scratch = Scratch::new();
    let mut store = f64::INFINITY;
    let mut load = f64::INFINITY;
    let mut release = f64::INFINITY;
    let mut ratio = 0.0;
    for _ in 0..ROUNDS {
        let mut slots = Vec::with_capacity(pages.len());
        let start = Instant::now();
        slots.extend(
            pages
                .iter()
                .map(|page| space.store(page, &mut scratch).expect("room")),
        );
        store = store.min(start.elapsed().as_nanos() as f64 / pages.len() as f64);
        let usage = space.usage();
        ratio = usage.original_bytes as f64 / usage.stored_bytes as f64;
        let mut out = [0; PAGE_SIZE];
        let loads = fastest(pages.len(), || {
            for slot in &slots {
                space
                    .load(*slot, &mut out, &mut scratch)
                    .expect("no damage");
            }
        });
        load = load.min(loads);
        let start = Instant::now();
        space.release_bulk(&slots);
        release = release.min(start.elapsed().as_nanos() as f64 / pages.len() as f64);
    }
    println!(
        "{what:32} store {store:6.0} ns  load {load:6.0} ns  release {release:5.0} ns  {ratio:.2}:1"
    );
}

/// A file in memory: what is measured is the tier, not a disk.
struct MemoryFile(Mutex<Vec<u8>>);

impl FileBackend for MemoryFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let contents = self.0.lock().expect("no panic under the lock");
        let from = offset as usize;
        let data = contents.get(from..from + buffer.len());
        buffer.copy_from_slice(data.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let mut contents = self.0.lock().expect("no panic under the lock");
        let end = offset as usize + data.len();
        if contents.len() < end {
            contents.resize(end, 0);
        }
        contents[offset as usize..end].copy_from_slice(data);
        Ok(())
    }
}

/// What it costs to move a page to the stronger algorithm and on to the file, and to load it there.
fn measure_moves(pages: &[Page], config: SwapConfig) -> Result<(), Box<dyn std::error::Error>> {
    let mut space = SwapSpace::new(HeapSource::new(), config)?;
    let file = Box::new(MemoryFile(Mutex::default()));
    space.add_tier(Box::new(FileTier::new(
        file,
        1 << 30,
        &TierKey::new([7; 32]),
        3,
    )?))?;
    let mut scratch = Scratch::new();
    let store = |page| space.store(page, &mut Scratch::new());
    let slots = pages.iter().map(store).collect::<Result<Vec<_>, _>>()?;
    let policies = [
        (
            "  recompress",
            ScanPolicy {
                recompress: Some(1),
                write_back: None,
            },
        ),
        (
            "  write back",
            ScanPolicy {
                recompress: Some(1),
                write_back: Some(1),
            },
        ),
    ];
    for (what, policy) in policies {
        space.scan(policy, usize::MAX, &mut scratch);
        let start = Instant::now();
        let report = space.scan(policy, usize::MAX, &mut scratch);
        let each = start.elapsed().as_nanos() as f64 / report.moved as f64;
        let mut out = [0; PAGE_SIZE];
        let load = fastest(pages.len(), || {
            for slot in &slots {
                space
                    .load(*slot, &mut out, &mut scratch)
                    .expect("no damage");
            }
        });
        let usage = space.usage();
        let ratio = usage.original_bytes as f64 / usage.stored_bytes as f64;
        println!(
            "{what:32} move  {each:6.0} ns  load {load:6.0} ns  {:19} {ratio:.2}:1",
            ""
        );
    }
    let start = Instant::now();
    let report = space.evacuate(TierKind::File, &mut scratch, || true);
    let each = start.elapsed().as_nanos() as f64 / report.moved as f64;
    println!("{:32} move  {each:6.0} ns", "  evacuate the file");
    Ok(())
}

/// What blocks of several sizes and levels take, and what it costs to build and to read them.
fn measure_blocks(pages: &[Page], base: &SwapConfig) -> Result<(), Box<dyn std::error::Error>> {
    let policy = ScanPolicy {
        recompress: Some(1),
        write_back: None,
    };
    for block_pages in [0, 4, 8, 16] {
        for level in [-3, -1, 1] {
            let mut shortest = f64::INFINITY;
            let mut line = String::new();
            for _ in 0..ROUNDS {
                let config = SwapConfig {
                    blocks: BlockShape {
                        pages: block_pages,
                        level,
                    },
                    recompress_level: level,
                    ..base.clone()
                };
                let space = SwapSpace::new(HeapSource::new(), config)?;
                let mut scratch = Scratch::new();
                let slots = pages
                    .iter()
                    .map(|page| space.store(page, &mut scratch))
                    .collect::<Result<Vec<_>, _>>()?;
                let before = space.usage();
                space.scan(policy, usize::MAX, &mut scratch);
                let start = Instant::now();
                space.scan(policy, usize::MAX, &mut scratch);
                shortest = shortest.min(start.elapsed().as_nanos() as f64 / pages.len() as f64);
                let usage = space.usage();
                space.compact(|| true);
                space.trim();
                let pool = space.usage().pool_bytes as f64 / before.pool_bytes as f64;
                let mut out = [0; PAGE_SIZE];
                let mut load = |order: &dyn Fn(usize) -> usize| {
                    fastest(pages.len(), || {
                        for index in 0..slots.len() {
                            let slot = slots[order(index)];
                            space.load(slot, &mut out, &mut scratch).expect("no damage");
                        }
                    })
                };
                let in_order = load(&|index| index);
                let scattered = load(&|index| index * 4099 % slots.len());
                line = format!(
                    "load {in_order:6.0} ns, alone {scattered:6.0} ns  {:5} in blocks  {:.2}:1, {:.3} of \
                     the bytes, {pool:.3} of the pool",
                    usage.block_pages,
                    usage.original_bytes as f64 / usage.stored_bytes as f64,
                    usage.stored_bytes as f64 / before.stored_bytes as f64,
                );
            }
            println!("  {block_pages:2} pages, level {level:2}  build {shortest:6.0} ns  {line}");
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut inputs = vec![("generated".to_owned(), generated())];
    for file in std::env::args().skip(1) {
        inputs.push((file.clone(), pages_of(&file)?));
    }
    let base = SwapConfig {
        pool_capacity_pages: 1 << 18,
        ..SwapConfig::default()
    };
    for (name, pages) in inputs {
        println!("{name}, {} pages", pages.len());
        if std::env::var_os("BLOCKS").is_some() {
            measure_blocks(&pages, &base)?;
            continue;
        }
        let space = SwapSpace::new(HeapSource::new(), base.clone())?;
        measure("  lz4, checksum", &pages, &space);
        let config = SwapConfig {
            checksum: false,
            ..base.clone()
        };
        measure("  lz4", &pages, &SwapSpace::new(HeapSource::new(), config)?);
        let config = SwapConfig {
            algorithm: Algorithm::Zstd,
            ..base.clone()
        };
        measure(
            "  zstd, checksum",
            &pages,
            &SwapSpace::new(HeapSource::new(), config)?,
        );
        let noop = |tier: Box<dyn memfold_swap::Tier>| match tier.kind() {
            TierKind::Compressed => Box::new(NoopTier::new(TierKind::Compressed)) as Box<_>,
            _ => tier,
        };
        let space = SwapSpace::with_tiers(HeapSource::new(), base.clone(), noop)?;
        measure("  no codec, no pool", &pages, &space);
        measure_moves(&pages, base.clone())?;
    }
    Ok(())
}
