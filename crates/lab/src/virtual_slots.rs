//! Slots with a fixed backend, the mailing-list thread's virtual slots with each of its three
//! optimisations left out in turn, and memfold's slots.

use std::{
    collections::VecDeque,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot, SlotRange, SlotRanges, SwapConfig, SwapSpace};
use serde_json::Value;

use crate::{
    Options,
    baselines::{
        SwapDesign,
        device::Tiers,
        slots::{Optimisations, Slots},
    },
    clock::thread_cpu,
    contents,
    mapping::Mapping,
    random::Random,
    report::{Report, Row, Samples},
    table::{
        designs::{MemoryDevice, Nowhere, Ours, some_page},
        usemem::{self, Load, Order},
    },
};

/// The design under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Fixed,
    Layered(Optimisations),
    Ours,
}

const ALL: Optimisations = Optimisations {
    cache_only_bit: true,
    range_group: true,
    recent_cluster: true,
};

const VARIANTS: [(&str, Variant); 7] = [
    ("fixed", Variant::Fixed),
    ("ours", Variant::Ours),
    ("virtual", Variant::Layered(ALL)),
    (
        "virtual-without-cache-only-bit",
        Variant::Layered(Optimisations {
            cache_only_bit: false,
            ..ALL
        }),
    ),
    (
        "virtual-without-range-group",
        Variant::Layered(Optimisations {
            range_group: false,
            ..ALL
        }),
    ),
    (
        "virtual-without-recent-cluster",
        Variant::Layered(Optimisations {
            recent_cluster: false,
            ..ALL
        }),
    ),
    (
        "virtual-without-any",
        Variant::Layered(Optimisations {
            cache_only_bit: false,
            range_group: false,
            recent_cluster: false,
        }),
    ),
];

/// The access pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workload {
    /// Fill memory and touch it again, over compressed pages.
    Usemem,
    /// Fill memory and free it, over compressed pages.
    Memhog,
    /// As usemem, but the device copies pages in memory, so that slots dominate the cost.
    UsememCopy,
    /// Read pages back and write to some, with the device nearly full.
    ReadBack,
    /// One operation on many slots, with no device behind them.
    Bare(Step),
}

/// The operation that a bare run times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Store,
    Load,
    Free,
}

const WORKLOADS: [(&str, Workload); 7] = [
    ("usemem", Workload::Usemem),
    ("memhog", Workload::Memhog),
    ("usemem-copy", Workload::UsememCopy),
    ("read-back-copy", Workload::ReadBack),
    ("store-bare", Workload::Bare(Step::Store)),
    ("load-bare", Workload::Bare(Step::Load)),
    ("free-bare", Workload::Bare(Step::Free)),
];

/// Measures all variants under all workloads, alternated.
pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("virtual");
    let runs = options.number("runs", 11)?.max(1);
    let megabytes = options.number("megabytes", 32)?;
    ensure!(
        (1..=2048).contains(&megabytes),
        "--megabytes takes 1 to 2048"
    );
    let threads = options.number("threads", 1)?;
    ensure!((1..=64).contains(&threads), "--threads takes 1 to 64");
    let wanted_variants = variants_of(options)?;
    let contents = contents::compressible(256);
    for (name, workload) in options.named("workload", &WORKLOADS)? {
        // Ours keeps no page both resident and swapped, so it has no cache-only slots.
        let variants: Vec<_> = wanted_variants
            .iter()
            .filter(|(_, variant)| workload != Workload::ReadBack || *variant != Variant::Ours)
            .collect();
        let mut samples = vec![[const { Samples::new() }; 2]; variants.len()];
        for run in 0..=runs {
            // Reverse the order in every second round.
            let mut order: Vec<usize> = (0..variants.len()).collect();
            if run % 2 == 1 {
                order.reverse();
            }
            for number in order {
                let (_, variant) = variants[number];
                let (wall, cpu) = measure(*variant, workload, threads, megabytes * 256, &contents)?;
                if run > 0 {
                    samples[number][0].push(wall.as_secs_f64());
                    samples[number][1].push(cpu.as_secs_f64());
                }
            }
        }
        for ((variant, _), [wall, cpu]) in variants.iter().zip(&samples) {
            report.add(
                Row::new()
                    .with("variant", *variant)
                    .with("workload", name)
                    .with("threads", threads)
                    .with("megabytes", megabytes)
                    .measured("seconds", wall)
                    .measured("cpu_seconds", cpu)
                    .measured("ratio_to_fixed", &wall.ratio_to(&samples[0][0]))
                    .measured("cpu_ratio_to_fixed", &cpu.ratio_to(&samples[0][1]))
                    .with("runs", runs)
                    .with("spread", wall.spread())
                    .with("published", published(name, variant)),
            );
        }
    }
    report.note(
        "fixed: a slot is a location on the device. virtual: the mailing-list thread's layer above \
         fixed slots, with reverse entries and a directory of clusters. ours: one entry, found by \
         index, holds count and location: no second look-up and no directory; the group is looked \
         up once per range in a cluster.",
    );
    report.note(
        "usemem, memhog: pages that compress 2.2:1, lz4 and checksums, the same tiers in all \
         designs. -copy: a device that copies pages in memory. -bare: no device, 32 times as many \
         slots. read-back: three of four pages are only read and keep their slots; the device is \
         nearly full. ratio: median of the rounds' ratios; above 1 is slower than fixed.",
    );
    Ok(report)
}

/// The variants named, after `fixed`, the reference of the ratios.
fn variants_of(options: &Options) -> Result<Vec<(&'static str, Variant)>> {
    let mut variants = vec![VARIANTS[0]];
    for found in options.named("variant", &VARIANTS)? {
        if !variants.contains(&found) {
            variants.push(found);
        }
    }
    Ok(variants)
}

fn published(workload: &str, variant: &str) -> Value {
    match (workload, variant) {
        ("usemem", "virtual-without-any") => "+4.8 % real time (56 GB)".into(),
        ("usemem", "virtual-without-recent-cluster") => "+2.4 %".into(),
        ("usemem", "virtual") => "+0.4 %".into(),
        ("memhog", "virtual-without-any") => "+3.1 % real time (48 GB)".into(),
        ("memhog", "virtual-without-recent-cluster" | "virtual") => "-0.8 %".into(),
        _ => Value::Null,
    }
}

/// Runs a workload with `pages` pages per thread. Returns wall time and CPU time.
fn measure(
    variant: Variant,
    workload: Workload,
    threads: usize,
    pages: usize,
    contents: &[Page],
) -> Result<(Duration, Duration)> {
    let room = match workload {
        // Room for the partly used clusters of each thread.
        Workload::ReadBack => threads * (pages * 11 / 10 + 1024),
        _ => threads * pages * 2 + 4096,
    };
    if let Workload::Bare(step) = workload {
        let nothing = Arc::new(Nowhere);
        let room = pages * BARE + 4096;
        return match variant {
            Variant::Ours => bare(&Ours::with_tier(room, 1, &nothing)?, pages * BARE, step),
            _ => bare(
                &layered(variant, 1, room, Tiers::one(nothing))?,
                pages * BARE,
                step,
            ),
        };
    }
    if workload == Workload::ReadBack {
        let design = layered(variant, threads, room, copy_tiers(room)?)?;
        return read_back(&design, threads, pages);
    }
    let some = [some_page()];
    let load = Load {
        pages,
        passes: if workload == Workload::Memhog { 0 } else { 2 },
        order: Order::Ascending,
        contents: match workload {
            Workload::Usemem | Workload::Memhog => contents,
            _ => &some,
        },
    };
    let design: Box<dyn SwapDesign> = match (variant, workload) {
        (Variant::Ours, Workload::Usemem | Workload::Memhog) => {
            Box::new(Ours(SwapSpace::new(Mapping, config(room, threads))?))
        }
        (Variant::Ours, _) => {
            let device = Arc::new(MemoryDevice::new(room + 1024)?);
            Box::new(Ours::with_tier(room, threads, &device)?)
        }
        (_, Workload::Usemem | Workload::Memhog) => {
            let tiers = Tiers::of_a_space(config(room, threads))?;
            Box::new(layered(variant, threads, room, tiers)?)
        }
        _ => Box::new(layered(variant, threads, room, copy_tiers(room)?)?),
    };
    let outcome = usemem::measure(&*design, threads, load)?;
    Ok((outcome.whole, outcome.cpu))
}

/// Slots of a bare run per page of the others.
const BARE: usize = 32;

/// Fills slots, loads from them in random order, frees them in ranges, and returns wall and CPU
/// time of `step`.
fn bare(design: &dyn SwapDesign, slots: usize, step: Step) -> Result<(Duration, Duration)> {
    let page = some_page();
    let pages = [&page; 64];
    let mut scratch = Scratch::new();
    let mut taken = Vec::with_capacity(slots + pages.len());
    let mut spent = (Duration::ZERO, Duration::ZERO);
    let mut timed = |now: Step, work: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let (begin, cpu) = (Instant::now(), thread_cpu());
        work()?;
        if now == step {
            spent = (begin.elapsed(), thread_cpu().saturating_sub(cpu));
        }
        Ok(())
    };
    timed(Step::Store, &mut || {
        while taken.len() < slots {
            design.store(0, &pages, &mut scratch, &mut taken)?;
        }
        Ok(())
    })?;
    // Runs of neighbours in random order, as readahead loads them.
    let mut out = [0; PAGE_SIZE];
    let mut runs: Vec<&[Slot]> = taken.chunks(16).collect();
    Random::new(1).shuffle(&mut runs);
    timed(Step::Load, &mut || {
        for &slot in runs.iter().copied().flatten() {
            design.load(0, slot, &mut out, &mut scratch)?;
        }
        Ok(())
    })?;
    timed(Step::Free, &mut || {
        for slots in taken.chunks(512) {
            let ranges: SlotRanges = slots.iter().copied().collect();
            design.release(0, ranges.as_slice());
        }
        Ok(())
    })?;
    ensure!(
        design.used() == 0,
        "{} slots are still in use",
        design.used()
    );
    Ok(spent)
}

fn config(slots: usize, threads: usize) -> SwapConfig {
    SwapConfig {
        pool_capacity_pages: 2 * slots,
        max_slots: slots,
        shards: threads,
        ..SwapConfig::default()
    }
}

fn copy_tiers(room: usize) -> Result<Tiers> {
    Ok(Tiers::one(Arc::new(MemoryDevice::new(room + 2048)?)))
}

fn layered(variant: Variant, threads: usize, room: usize, tiers: Tiers) -> Result<Slots> {
    let optimisations = match variant {
        Variant::Fixed => None,
        Variant::Layered(optimisations) => Some(optimisations),
        Variant::Ours => anyhow::bail!("the variant ours has no layer above a device"),
    };
    Slots::new(tiers, room, threads, optimisations)
}

/// Passes over the memory after the first.
const PASSES: usize = 4;
/// One touch in `WRITTEN`, chosen at random, writes. More writes keep fewer cache-only slots.
const WRITTEN: usize = 4;
/// Pages per reclaim batch.
const TOGETHER: usize = 32;

/// Where a page of a read-back run is.
#[derive(Debug, Clone, Copy)]
enum Place {
    Never,
    /// In a frame, and possibly still in a slot.
    Resident(usize, Option<Slot>),
    Swapped(Slot),
}

struct Reader<'a> {
    design: &'a Slots,
    thread: usize,
    pages: Vec<Place>,
    frames: Vec<Page>,
    resident: VecDeque<(usize, usize)>,
    unused: Vec<usize>,
    scratch: Scratch,
}

impl<'a> Reader<'a> {
    fn new(design: &'a Slots, thread: usize, pages: usize, frames: usize) -> Self {
        Self {
            design,
            thread,
            pages: vec![Place::Never; pages],
            frames: vec![[1; PAGE_SIZE]; frames],
            resident: VecDeque::with_capacity(frames),
            unused: (0..frames).collect(),
            scratch: Scratch::new(),
        }
    }

    /// The page's identity in the design. It is unique across threads: otherwise a thread whose
    /// slot was reused for the same page number of another thread would take over that page.
    fn owner(&self, page: usize) -> usize {
        self.thread * self.pages.len() + page
    }

    fn touch(&mut self, page: usize, write: bool, version: &mut u64) -> Result<()> {
        let (frame, kept) = match self.pages[page] {
            Place::Resident(frame, kept) => (frame, kept),
            place => {
                if self.unused.is_empty() {
                    self.reclaim()?;
                }
                let frame = self.unused.pop().context("reclaim freed no frame")?;
                let mut kept = None;
                if let Place::Swapped(slot) = place {
                    self.design.load(
                        self.thread,
                        slot,
                        &mut self.frames[frame],
                        &mut self.scratch,
                    )?;
                    self.design.keep(self.thread, slot, self.owner(page));
                    kept = Some(slot);
                } else {
                    mark(&mut self.frames[frame], page, 0);
                }
                self.resident.push_back((page, frame));
                (frame, kept)
            }
        };
        ensure!(
            self.frames[frame][..16] == stamp(page, *version),
            "page {page} read back wrong"
        );
        let kept = match kept {
            Some(slot) if write => {
                // The copy in the slot is stale.
                if self.design.reuse(self.thread, slot, self.owner(page)) {
                    self.design.release(self.thread, &[SlotRange::new(slot, 1)]);
                }
                None
            }
            kept => kept,
        };
        if write {
            *version += 1;
            mark(&mut self.frames[frame], page, *version);
        }
        self.pages[page] = Place::Resident(frame, kept);
        Ok(())
    }

    fn reclaim(&mut self) -> Result<()> {
        let count = TOGETHER.min(self.resident.len());
        let victims: Vec<_> = self.resident.drain(..count).collect();
        let mut stored = Vec::with_capacity(count);
        for (page, frame) in victims {
            self.unused.push(frame);
            match self.pages[page] {
                Place::Resident(_, Some(slot))
                    if self.design.reuse(self.thread, slot, self.owner(page)) =>
                {
                    self.pages[page] = Place::Swapped(slot);
                }
                _ => stored.push((page, frame)),
            }
        }
        let frames: Vec<&Page> = stored.iter().map(|&(_, at)| &self.frames[at]).collect();
        let mut slots = Vec::with_capacity(frames.len());
        self.design
            .store(self.thread, &frames, &mut self.scratch, &mut slots)?;
        for (&(page, _), &slot) in stored.iter().zip(&slots) {
            self.pages[page] = Place::Swapped(slot);
        }
        Ok(())
    }

    fn free(&mut self) {
        for page in 0..self.pages.len() {
            let slot = match self.pages[page] {
                Place::Swapped(slot) => Some(slot),
                Place::Resident(_, Some(slot)) => self
                    .design
                    .reuse(self.thread, slot, self.owner(page))
                    .then_some(slot),
                _ => None,
            };
            if let Some(slot) = slot {
                self.design.release(self.thread, &[SlotRange::new(slot, 1)]);
            }
        }
    }
}

fn stamp(page: usize, version: u64) -> [u8; 16] {
    let mut stamp = [0; 16];
    stamp[..8].copy_from_slice(&(page as u64).to_le_bytes());
    stamp[8..].copy_from_slice(&version.to_le_bytes());
    stamp
}

fn mark(frame: &mut Page, page: usize, version: u64) {
    frame[..16].copy_from_slice(&stamp(page, version));
}

fn read_back(design: &Slots, threads: usize, pages: usize) -> Result<(Duration, Duration)> {
    let barrier = Barrier::new(threads + 1);
    let times = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let barrier = &barrier;
                scope.spawn(move || -> Result<Duration> {
                    let frames = (pages / 2).max(2 * TOGETHER);
                    let mut reader = Reader::new(design, thread, pages, frames);
                    let mut versions = vec![0; pages];
                    let mut random = Random::new(thread as u64 + 1);
                    barrier.wait();
                    let cpu = thread_cpu();
                    let read = (0..=PASSES).try_for_each(|_| {
                        (0..pages).try_for_each(|page| {
                            let write = random.below(WRITTEN) == 0;
                            reader.touch(page, write, &mut versions[page])
                        })
                    });
                    reader.free();
                    read?;
                    Ok(thread_cpu().saturating_sub(cpu))
                })
            })
            .collect();
        barrier.wait();
        let begin = Instant::now();
        let mut cpu = Duration::ZERO;
        for thread in threads {
            cpu += thread.join().ok().context("a thread panicked")??;
        }
        anyhow::Ok((begin.elapsed(), cpu))
    })?;
    ensure!(
        design.used() == 0,
        "{} slots are still in use",
        design.used()
    );
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_reads_back_what_was_written() {
        let contents = contents::compressible(16);
        for (name, variant) in VARIANTS {
            for (workload_name, workload) in WORKLOADS {
                if workload == Workload::ReadBack && variant == Variant::Ours {
                    continue;
                }
                let outcome = measure(variant, workload, 2, 3000, &contents);
                assert!(outcome.is_ok(), "{name}, {workload_name}: {outcome:?}");
            }
        }
    }

    /// A cache-only slot is reused for another thread's page of the same number: the first thread
    /// must not mistake that page for its own.
    #[test]
    fn equal_page_numbers_of_two_threads_are_distinct() {
        const PAGES: usize = 1000;
        for (name, variant) in VARIANTS {
            if variant == Variant::Ours {
                continue;
            }
            let room = 2 * PAGES;
            let design = layered(variant, 2, room, copy_tiers(room).unwrap()).unwrap();
            let mut readers = [0, 1].map(|thread| Reader::new(&design, thread, PAGES, PAGES / 2));
            let mut versions = [const { [0; PAGES] }; 2];
            let mut random = Random::new(7);
            for _ in 0..200 * PAGES {
                let (thread, page) = (random.below(2), random.below(PAGES));
                let write = random.below(WRITTEN) == 0;
                let touched = readers[thread].touch(page, write, &mut versions[thread][page]);
                assert!(touched.is_ok(), "{name}: {touched:?}");
            }
            readers.iter_mut().for_each(Reader::free);
            assert_eq!(design.used(), 0, "{name}: slots are left");
        }
    }
}
