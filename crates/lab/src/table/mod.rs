//! The swap table beside the design it replaced: a locked tree per 64 MB of swap, with a byte map.

pub mod designs;
mod operations;
pub mod usemem;

use std::sync::Arc;

use anyhow::{Result, ensure};
use memfold_swap::{Page, Scratch, Slot, SlotRanges};
use serde_json::Value;

use self::{
    designs::{MemoryDevice, Nowhere, Ours, some_page},
    operations::OPERATIONS,
    usemem::{Load, Order},
};
use crate::{
    Options,
    baselines::{
        SwapDesign,
        tree::{LookUp, TreeSpace},
    },
    report::{Report, Row, Samples, anonymous_bytes, rounded},
};

/// The designs. `tree` takes its lock for look-ups too; `tree-lock-free` does not, as in the
/// kernel.
const VARIANTS: [&str; 3] = ["tree", "tree-lock-free", "swap-table"];

/// Measures operations, usemem and memory of all designs.
pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("table");
    let runs = options.number("runs", 5)?.max(1);
    let slots = options.number("slots", 1 << 20)?;
    ensure!(
        (1 << 12..=1 << 26).contains(&slots),
        "--slots takes 4096 to 2^26"
    );
    let threads = options.numbers("threads", "1,2,4")?;
    ensure!(
        threads.iter().all(|threads| (1..=64).contains(threads)),
        "--threads takes 1 to 64"
    );
    let megabytes = options.number("megabytes", 128)?;
    ensure!(
        (1..=2048).contains(&megabytes),
        "--megabytes takes 1 to 2048"
    );
    for &threads in &threads {
        add_operations(&mut report, threads, slots, runs)?;
    }
    for &threads in &threads {
        for order in [Order::Ascending, Order::Random] {
            add_usemem(&mut report, threads, megabytes * 256, order, runs)?;
        }
    }
    add_memory(&mut report, slots)?;
    report.note(
        "tree: every operation takes the tree's lock; tree-lock-free: look-ups take none, as in the \
         kernel. look-up: random slots of all threads; look-up-in-order: neighbours. All designs \
         keep counts, charge a group and count pages. ratio: to tree.",
    );
    report.note(
        "usemem: each thread has --megabytes of memory and frames for half of it, touches all of it \
         four times and frees it (free_ms); the swap device copies pages in memory. cpu_seconds: \
         CPU time of all threads, freeing included.",
    );
    report.note(
        "bytes_per_slot: anonymous memory of the process taken for slots, over all slots of the \
         space; bytes_per_used_slot: over those in use. half-scattered: every second slot of a full \
         space was freed.",
    );
    Ok(report)
}

fn published(operation: &str, variant: &str) -> Value {
    match (operation, variant) {
        ("usemem", "swap-table") => {
            "throughput +33.6 % (31 x 1 GB), +23.7 % (32 x 1.5 GB); system time -27 %, -17 %; \
             free -24 %, -5 %"
                .into()
        }
        ("memory", "tree") => "3 static + 8 dynamic".into(),
        ("memory", "swap-table") => "8 dynamic".into(),
        _ => Value::Null,
    }
}

fn add_operations(report: &mut Report, threads: usize, slots: usize, runs: usize) -> Result<()> {
    let mut samples = vec![[const { Samples::new() }; OPERATIONS.len()]; VARIANTS.len()];
    // Round 0 is not counted: it faults in the machine's memory for the first time.
    for run in 0..=runs {
        for (variant, samples) in VARIANTS.iter().zip(&mut samples) {
            let rates = operations_of(variant, threads, slots)?;
            for (sample, rate) in samples.iter_mut().zip(rates) {
                if run > 0 {
                    sample.push(rate);
                }
            }
        }
    }
    for (operation, name) in OPERATIONS.iter().enumerate() {
        for (variant, of_variant) in VARIANTS.iter().zip(&samples) {
            let rate = &of_variant[operation];
            let ratio = rate.ratio_to(&samples[0][operation]);
            report.add(
                Row::new()
                    .with("variant", *variant)
                    .with("op", *name)
                    .with("threads", threads)
                    .measured("mops_per_s", rate)
                    .measured("ratio", &ratio)
                    .with("runs", runs)
                    .with("spread", rate.spread())
                    .with("published", published(name, variant)),
            );
        }
    }
    Ok(())
}

fn operations_of(variant: &str, threads: usize, slots: usize) -> Result<[f64; OPERATIONS.len()]> {
    let tier = Arc::new(Nowhere);
    // Each thread holds a whole cluster.
    let room = slots + (threads + 1) * 512;
    match tree_of(variant) {
        Some(look_up) => {
            let space = TreeSpace::new(look_up, room, threads, tier)?;
            operations::measure(&space, threads, slots)
        }
        None => {
            let space = Ours::with_tier(room, threads, &tier)?;
            operations::measure(&space, threads, slots)
        }
    }
}

fn tree_of(variant: &str) -> Option<LookUp> {
    match variant {
        "tree" => Some(LookUp::Locked),
        "tree-lock-free" => Some(LookUp::LockFree),
        _ => None,
    }
}

fn add_usemem(
    report: &mut Report,
    threads: usize,
    pages: usize,
    order: Order,
    runs: usize,
) -> Result<()> {
    // Room for partly freed clusters: pages are freed in FIFO order.
    let room = threads * pages * 2 + 4096;
    let mut samples = vec![[const { Samples::new() }; 4]; VARIANTS.len()];
    for run in 0..=runs {
        for (variant, samples) in VARIANTS.iter().zip(&mut samples) {
            let device = Arc::new(MemoryDevice::new(room + 1024)?);
            let design: Box<dyn SwapDesign> = match tree_of(variant) {
                Some(look_up) => Box::new(TreeSpace::new(look_up, room, threads, device)?),
                None => Box::new(Ours::with_tier(room, threads, &device)?),
            };
            let load = Load {
                pages,
                passes: 3,
                order,
                contents: &[some_page()],
            };
            let outcome = usemem::measure(&*design, threads, load)?;
            if run > 0 {
                samples[0].push(outcome.moved_per_microsecond);
                samples[1].push(outcome.megabytes_per_second);
                samples[2].push(outcome.cpu.as_secs_f64());
                samples[3].push(outcome.free.as_secs_f64() * 1e3);
            }
        }
    }
    let name = match order {
        Order::Ascending => "usemem",
        Order::Random => "usemem-random",
    };
    for (variant, [moved, throughput, cpu, free]) in VARIANTS.iter().zip(&samples) {
        let ratio = throughput.ratio_to(&samples[0][1]);
        report.add(
            Row::new()
                .with("variant", *variant)
                .with("op", name)
                .with("threads", threads)
                .measured("mops_per_s", moved)
                .measured("ratio", &ratio)
                .measured("mb_per_s", throughput)
                .measured("cpu_seconds", cpu)
                .measured("free_ms", free)
                .with("runs", runs)
                .with("spread", throughput.spread())
                .with("published", published(name, variant)),
        );
    }
    Ok(())
}

/// Fill levels at which a space's memory is measured.
const FILLS: [&str; 4] = ["empty", "half", "full", "half-scattered"];

fn add_memory(report: &mut Report, slots: usize) -> Result<()> {
    for variant in ["tree", "swap-table"] {
        let tier = Arc::new(Nowhere);
        let before = anonymous_bytes()?;
        let found = match tree_of(variant) {
            Some(look_up) => fill(before, slots, || {
                Ok(Box::new(TreeSpace::new(look_up, slots, 1, tier)?))
            })?,
            None => fill(before, slots, || {
                Ok(Box::new(Ours::with_tier(slots, 1, &tier)?))
            })?,
        };
        for (name, (bytes, used)) in FILLS.into_iter().zip(found) {
            let per_used = match used {
                0 => Value::Null,
                _ => rounded(bytes as f64 / used as f64).into(),
            };
            report.add(
                Row::new()
                    .with("variant", variant)
                    .with("op", "memory")
                    .with("fill", name)
                    .with("bytes_per_slot", rounded(bytes as f64 / slots as f64))
                    .with("bytes_per_used_slot", per_used)
                    .with("published", published("memory", variant)),
            );
        }
    }
    Ok(())
}

/// Fills a space. Returns its memory in bytes and the slots in use at each of [`FILLS`].
fn fill(
    before: usize,
    slots: usize,
    make: impl FnOnce() -> Result<Box<dyn SwapDesign>>,
) -> Result<[(usize, usize); FILLS.len()]> {
    let page = some_page();
    let pages: [&Page; 64] = [&page; 64];
    let mut scratch = Scratch::new();
    // Allocate and touch the harness's own memory first, and subtract it.
    let mut taken = vec![Slot::from_raw(1); slots];
    taken.clear();
    let scattered = |taken: &[Slot]| -> SlotRanges { taken.iter().step_by(2).copied().collect() };
    let own = anonymous_bytes()?.saturating_sub(before);
    let bytes = || Ok::<_, anyhow::Error>(anonymous_bytes()?.saturating_sub(before + own));
    let space = make()?;
    let mut found = [(0, 0); FILLS.len()];
    found[0] = (bytes()?, 0);
    for (part, place) in [(slots / 2, 1), (slots, 2)] {
        while taken.len() < part {
            let count = pages.len().min(part - taken.len());
            space.store(0, &pages[..count], &mut scratch, &mut taken)?;
        }
        ensure!(
            space.used() as usize == part,
            "{} of {part} slots are in use",
            space.used()
        );
        found[place] = (bytes()?, part);
    }
    for slots in taken.chunks(1 << 14) {
        space.release(0, scattered(slots).as_slice());
    }
    let left = space.used() as usize;
    ensure!(
        left == slots / 2,
        "{left} slots are in use after half of {slots} were freed"
    );
    found[3] = (bytes()?, left);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_design_finds_what_was_inserted() {
        for variant in VARIANTS {
            for threads in [1, 2] {
                let rates = operations_of(variant, threads, 1 << 14).unwrap();
                assert!(rates.iter().all(|&rate| rate > 0.0), "{variant}");
            }
        }
    }

    /// A slot of the swap table costs 8 bytes when in use and nothing before; the tree costs more.
    #[test]
    fn slots_cost_what_they_should() {
        const SLOTS: usize = 1 << 18;
        let tier = || Arc::new(Nowhere);
        let space = Ours::with_tier(SLOTS, 1, &tier()).unwrap();
        let page = some_page();
        let pages = vec![&page; SLOTS];
        let empty = space.0.usage();
        assert_eq!(empty.table_bytes, 0);
        let mut slots = Vec::new();
        space
            .store(0, &pages, &mut Scratch::new(), &mut slots)
            .unwrap();
        // Includes the growth of the records beside the tables.
        let added = space.0.usage().metadata_bytes - empty.metadata_bytes;
        let ours = added as f64 / SLOTS as f64;
        assert!((8.0..8.5).contains(&ours), "{ours} bytes a slot");
        let tree = TreeSpace::new(LookUp::Locked, SLOTS, 1, tier()).unwrap();
        let empty = tree.bytes() as f64 / SLOTS as f64;
        tree.store(0, &pages, &mut Scratch::new(), &mut Vec::new())
            .unwrap();
        let full = tree.bytes() as f64 / SLOTS as f64;
        assert!(empty >= 3.0 && full >= 12.0, "{empty}, {full} bytes a slot");
    }
}
