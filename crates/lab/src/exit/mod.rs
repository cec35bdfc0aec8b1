//! Kills programs whose memory is mostly swapped out, while another program starts.

mod process;

pub use process::{NEWCOMER, PROGRAM, hold, start};

use std::{
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use memfold_swap::{
    Gather, GatherConfig, PAGE_SIZE, Page, Scratch, Slot, SlotRanges, SwapConfig, SwapSpace,
};
use serde_json::Value;

use self::process::Process;
use crate::{
    Options, clock, contents,
    host::{Guardian, MemoryGroup, Zram},
    mapping::Mapping,
    random::Random,
    report::{Report, Row, Samples},
};

/// How the slots of an exiting program are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// By the exiting program, slot by slot: the replaced design.
    Sync,
    /// By the exiting program, in bulk.
    SyncBulk,
    /// By the gather's workers, in batches.
    Gather,
    /// By this host's kernel.
    Zram,
}

const VARIANTS: [(&str, Variant); 4] = [
    ("sync", Variant::Sync),
    ("sync-bulk", Variant::SyncBulk),
    ("gather", Variant::Gather),
    ("zram", Variant::Zram),
];

/// Share of the pages swapped out, in percent: that of an app after 15 minutes in the background in
/// the published test.
const SWAPPED_PERCENT: usize = 65;
/// Neighbouring pages of one program that are stored together, as by reclaim.
const STORED_TOGETHER: usize = 64;
/// How long a run waits for its memory to be freed before it fails.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that zram may still hold when all memory counts as freed.
const LEFT_IN_ZRAM: u64 = 1 << 20;

#[derive(Debug, Clone, Copy)]
struct Case {
    programs: usize,
    /// Pages of each program.
    pages: usize,
    newcomer_pages: usize,
}

impl Case {
    fn swapped(self) -> usize {
        self.pages * SWAPPED_PERCENT / 100
    }
}

/// The result of one run.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    newcomer: Duration,
    gone: Duration,
    returned: Duration,
    cpu: Duration,
}

/// Measures all variants, alternated.
pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("exit");
    let runs = options.number("runs", 5)?.max(1);
    let case = case(options)?;
    let mut variants = options.named("variant", &VARIANTS)?;
    let zram = variants
        .iter()
        .any(|(_, variant)| *variant == Variant::Zram);
    let guardian = match zram.then(Guardian::start).transpose() {
        // zram was not named with --variant: run the others without it.
        Err(error) if options.value("variant").is_none() => {
            eprintln!("memfold-lab: SKIPPED zram: {error:#}");
            report.note(format!("SKIPPED zram: {error:#}"));
            variants.retain(|(_, variant)| *variant != Variant::Zram);
            None
        }
        started => started?,
    };
    let mut samples = vec![[const { Samples::new() }; 4]; variants.len()];
    let mut alone = Samples::new();
    // Round 0 is not counted: it faults in the machine's memory for the first time.
    for run in 0..=runs {
        let undisturbed = start_newcomer(case)?;
        if run > 0 {
            alone.push(undisturbed.as_secs_f64() * 1e3);
        }
        for ((name, variant), samples) in variants.iter().zip(&mut samples) {
            let outcome = match (variant, &guardian) {
                (Variant::Zram, Some(guardian)) => measure_zram(guardian, case),
                _ => measure(*variant, case),
            }
            .with_context(|| format!("cannot measure {name}"))?;
            let Outcome {
                newcomer,
                gone,
                returned,
                cpu,
            } = outcome;
            if run > 0 {
                for (samples, time) in samples.iter_mut().zip([newcomer, gone, returned, cpu]) {
                    samples.push(time.as_secs_f64() * 1e3);
                }
            }
        }
    }
    for ((name, variant), [newcomer, gone, returned, cpu]) in variants.iter().zip(&samples) {
        report.add(
            Row::new()
                .with("variant", *name)
                .with("programs", case.programs)
                .with("megabytes", case.pages / 256)
                .measured("newcomer_ms", newcomer)
                .measured("gone_ms", gone)
                .measured("returned_ms", returned)
                .measured("cpu_ms", cpu)
                .measured("newcomer_ratio", &newcomer.ratio_to(&samples[0][0]))
                .with("runs", runs)
                .with("spread", newcomer.spread())
                .with("published", published(*variant)),
        );
    }
    report.note(format!(
        "newcomer_ms without any program killed: {:.1}.",
        alone.median()
    ));
    add_notes(&mut report);
    Ok(report)
}

fn case(options: &Options) -> Result<Case> {
    let case = Case {
        programs: options.number("programs", 12)?,
        pages: options.number("megabytes", 256)? * 256,
        newcomer_pages: options.number("newcomer-megabytes", 64)? * 256,
    };
    ensure!(
        (1..=64).contains(&case.programs),
        "--programs takes 1 to 64"
    );
    ensure!(
        (256..=1 << 18).contains(&case.pages) && (256..=1 << 18).contains(&case.newcomer_pages),
        "--megabytes and --newcomer-megabytes take 1 to 1024"
    );
    Ok(case)
}

fn add_notes(report: &mut Report) {
    report.note(
        "newcomer_ms: from the kills, when the newcomer starts, until it has touched its memory; \
         gone_ms: until every killed program has exited; returned_ms: until all their memory is \
         freed; cpu_ms: CPU time of all but the newcomer; newcomer_ratio: to the first variant, \
         median over rounds.",
    );
    report.note(
        "65 % of each program is swapped out. In sync, sync-bulk and gather the programs are \
         processes that hold their resident part; their swapped part lies compressed in memfold's \
         swap space, and one thread per program stands in for its exit: it waits until the process \
         has exited, then releases the slots itself, one by one (sync) or in bulk, or hands them to \
         the gather. zram: processes in a memory cgroup.",
    );
    report.note(
        "There is enough free memory for the newcomer in every variant, so it competes for CPU time \
         only. In the published test, on a phone, it waits for memory as well.",
    );
}

fn published(variant: Variant) -> Value {
    match variant {
        Variant::Sync => "cold start 1512 ms, preview 352 ms".into(),
        Variant::Gather => "cold start 1204 ms (-20 %), preview 205 ms (-42 %)".into(),
        _ => Value::Null,
    }
}

/// Stores the swapped pages of all programs in the order of reclaim: batches of neighbours,
/// programs interleaved. Returns each program's slots in page order.
fn fill(space: &SwapSpace<Mapping>, case: Case) -> Result<Vec<Vec<Slot>>> {
    let contents = contents::compressible(256);
    let mut scratch = Scratch::new();
    let mut slots = vec![Vec::with_capacity(case.swapped()); case.programs];
    let mut batches: Vec<usize> = (0..case.programs)
        .flat_map(|program| std::iter::repeat_n(program, case.swapped().div_ceil(STORED_TOGETHER)))
        .collect();
    Random::new(1).shuffle(&mut batches);
    let mut stored = Vec::with_capacity(STORED_TOGETHER);
    for program in batches {
        let of_program = &mut slots[program];
        let count = STORED_TOGETHER.min(case.swapped() - of_program.len());
        let next = contents
            .iter()
            .cycle()
            .skip(of_program.len() % contents.len());
        let pages: Vec<&Page> = next.take(count).collect();
        stored.clear();
        space.store_batch(&pages, &mut scratch, &mut stored);
        for slot in stored.drain(..) {
            of_program.push(slot?);
        }
    }
    Ok(slots)
}

fn measure(variant: Variant, case: Case) -> Result<Outcome> {
    let slots = case.programs * case.pages;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let config = SwapConfig {
        pool_capacity_pages: 2 * slots,
        max_slots: 2 * slots,
        shards: cpus,
        ..SwapConfig::default()
    };
    let space = Arc::new(SwapSpace::new(Mapping, config)?);
    let slots = fill(&space, case)?;
    let gather = Gather::with_worker_start(
        Arc::clone(&space),
        GatherConfig {
            // Leave one CPU to other threads.
            max_workers: (cpus - 1).max(1),
            ..GatherConfig::default()
        },
        // The nice value of the supervisor's workers.
        || memfold_sys::thread::set_nice(5),
    );
    let mut programs = start_programs(case.programs, case.pages - case.swapped(), |_| Ok(()))?;
    let barrier = Barrier::new(case.programs + 1);
    thread::scope(|scope| {
        let exits: Vec<_> = programs
            .iter_mut()
            .zip(&slots)
            .map(|(program, slots)| {
                let (barrier, space, gather) = (&barrier, &space, &gather);
                scope.spawn(move || -> Result<(Duration, Instant)> {
                    barrier.wait();
                    program.kill()?;
                    let used = program.wait()?;
                    exit(variant, space, gather, slots);
                    Ok((used, Instant::now()))
                })
            })
            .collect();
        barrier.wait();
        let begin = Instant::now();
        let cpu = (clock::process_cpu(), clock::thread_cpu());
        let newcomer = start_newcomer(case);
        let mut of_programs = Duration::ZERO;
        let mut last = begin;
        for exit in exits {
            let (used, gone) = exit.join().ok().context("a thread panicked")??;
            of_programs += used;
            last = last.max(gone);
        }
        wait_until(begin, || Ok(space.usage().slots_in_use == 0))?;
        // Slots count as free before their storage is. What is freed after the trim may leave an empty zspage in its bin.
        gather.flush();
        let polling = clock::thread_cpu().saturating_sub(cpu.1);
        // Frees the pages that the pool caches for later stores.
        space.trim();
        let returned = wait_until(begin, || Ok(space.pool_bytes() == 0))?;
        let own = clock::process_cpu().saturating_sub(cpu.0);
        Ok(Outcome {
            newcomer: newcomer?,
            gone: last - begin,
            returned,
            cpu: of_programs + own.saturating_sub(polling),
        })
    })
}

/// Releases an exiting program's slots.
fn exit(variant: Variant, space: &SwapSpace<Mapping>, gather: &Gather<Mapping>, slots: &[Slot]) {
    match variant {
        Variant::SyncBulk => space.release_bulk(slots),
        Variant::Gather => gather.release(slots.iter().copied().collect::<SlotRanges>()),
        _ => slots.iter().for_each(|&slot| space.release(slot)),
    }
}

fn start_programs(
    count: usize,
    pages: usize,
    prepare: impl Fn(&mut std::process::Command) -> Result<()>,
) -> Result<Vec<Process>> {
    let mut programs = (0..count)
        .map(|_| Process::spawn(PROGRAM, pages, &prepare))
        .collect::<Result<Vec<_>>>()?;
    programs.iter_mut().try_for_each(Process::ready)?;
    Ok(programs)
}

/// Runs the newcomer. Returns the time until it has touched its memory.
fn start_newcomer(case: Case) -> Result<Duration> {
    let begin = Instant::now();
    let mut newcomer = Process::spawn(NEWCOMER, case.newcomer_pages, |_| Ok(()))?;
    newcomer.ready()?;
    let started = begin.elapsed();
    newcomer.wait()?;
    Ok(started)
}

fn wait_until(begin: Instant, done: impl Fn() -> Result<bool>) -> Result<Duration> {
    while !done()? {
        ensure!(
            begin.elapsed() < TIMEOUT,
            "the memory was not freed within {} s",
            TIMEOUT.as_secs()
        );
        thread::sleep(Duration::from_micros(500));
    }
    Ok(begin.elapsed())
}

fn measure_zram(guardian: &Guardian, case: Case) -> Result<Outcome> {
    let bytes = (case.programs * case.pages * PAGE_SIZE) as u64;
    let zram = Zram::start(guardian, "lz4", 2 * bytes)?;
    let resident = bytes / 100 * (100 - SWAPPED_PERCENT as u64);
    let group = MemoryGroup::start(guardian, Some(resident))?;
    let mut programs =
        start_programs(case.programs, case.pages, |command| group.run_here(command))?;
    let swapped = zram.usage()?.original;
    ensure!(
        swapped > bytes / 2,
        "only {swapped} of {bytes} bytes were swapped out"
    );
    let barrier = Barrier::new(case.programs + 1);
    thread::scope(|scope| {
        let exits: Vec<_> = programs
            .iter_mut()
            .map(|program| {
                let barrier = &barrier;
                scope.spawn(move || -> Result<(Duration, Instant)> {
                    barrier.wait();
                    program.kill()?;
                    Ok((program.wait()?, Instant::now()))
                })
            })
            .collect();
        barrier.wait();
        let begin = Instant::now();
        let newcomer = start_newcomer(case);
        let mut cpu = Duration::ZERO;
        let mut last = begin;
        for exit in exits {
            let (used, gone) = exit.join().ok().context("a thread panicked")??;
            cpu += used;
            last = last.max(gone);
        }
        let returned = wait_until(begin, || Ok(zram.usage()?.used < LEFT_IN_ZRAM))?;
        Ok(Outcome {
            newcomer: newcomer?,
            gone: last - begin,
            returned,
            cpu,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every variant releases all slots and empties the pool.
    #[test]
    fn every_variant_frees_all_memory() {
        let case = Case {
            programs: 3,
            pages: 3000,
            newcomer_pages: 256,
        };
        for (name, variant) in VARIANTS {
            if variant == Variant::Zram {
                continue;
            }
            let space = Arc::new(
                SwapSpace::new(
                    Mapping,
                    SwapConfig {
                        pool_capacity_pages: 1 << 15,
                        max_slots: 1 << 15,
                        ..SwapConfig::default()
                    },
                )
                .unwrap(),
            );
            let gather = Gather::new(Arc::clone(&space), GatherConfig::default());
            let slots = fill(&space, case).unwrap();
            assert!(slots.iter().all(|slots| slots.len() == case.swapped()));
            assert_eq!(
                space.usage().slots_in_use as usize,
                case.programs * case.swapped()
            );
            slots
                .iter()
                .for_each(|slots| exit(variant, &space, &gather, slots));
            gather.flush();
            assert_eq!(space.usage().slots_in_use, 0, "{name}");
            space.trim();
            assert_eq!(space.pool_bytes(), 0, "{name}");
        }
    }
}
