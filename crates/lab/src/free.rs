//! The cost of a free: wall time of the caller, CPU time of all threads, time until it is complete.
//!
//! Objects have the compressed sizes of recorded pages. They are stored in clusters of 64 pages in
//! random order, as by reclaim, and freed in page order, as by munmap. Each thread frees its own
//! part, standing in for a process.

use std::{
    cell::LazyCell,
    ptr::NonNull,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, Scope, ScopedJoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use memfold_sys::thread::{nice, set_nice};
use zsmalloc::{Config, Drainer, PAGE_SIZE, PageRun, PageSource, Pool};

use crate::{
    Options,
    baselines::zsmalloc::{Original, Step},
    clock::{process_cpu, thread_cpu},
    mapping::Mapping,
    random::Random,
    report::{Report, Row, Samples, rounded},
    trace,
    words::{NUMBER_BYTES, Words},
};

/// Neighbouring pages that are stored together, as by reclaim. A larger cluster puts more
/// neighbours into the same zspage, which frees in page order empty sooner.
const CLUSTER: usize = 64;

/// Objects per call of the bulk free. More amortise the locks further and take a larger array.
const BULK: usize = 64 * 1024;

/// How long a run waits for its memory to be freed before it fails.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Original(Step),
    Deferred(Drain),
    Bulk(Drain),
    /// In bulk, without a drainer: the caller frees the pages itself.
    BulkAlone,
}

/// Scheduling priority of the drainer's threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drain {
    Normal,
    /// With the nice value [`RAISED`].
    Raised,
}

/// Nice value of a raised drainer: the highest priority of `SCHED_OTHER`.
const RAISED: i32 = -20;

const VARIANTS: [(&str, Variant); 9] = [
    ("pool-lock", Variant::Original(Step::PoolLock)),
    ("pool-lock-kept", Variant::Original(Step::PoolLockKept)),
    ("outside-lock", Variant::Original(Step::OutsideLock)),
    ("class-index", Variant::Original(Step::ClassIndex)),
    ("deferred", Variant::Deferred(Drain::Normal)),
    ("deferred-raised", Variant::Deferred(Drain::Raised)),
    ("bulk", Variant::Bulk(Drain::Normal)),
    ("bulk-raised", Variant::Bulk(Drain::Raised)),
    ("bulk-alone", Variant::BulkAlone),
];

impl Variant {
    /// Whether the drainer runs with a raised priority.
    fn raises(self) -> bool {
        matches!(
            self,
            Self::Deferred(Drain::Raised) | Self::Bulk(Drain::Raised)
        )
    }

    /// Runs on the drainer's thread before it drains.
    fn prepare_drainer(self) {
        if self.raises() {
            set_nice(RAISED);
        }
    }
}

/// Whether `RLIMIT_NICE` or `CAP_SYS_NICE` allows [`RAISED`].
fn may_raise() -> bool {
    // In a thread of its own, so that the caller keeps its nice value.
    let raised = thread::spawn(|| {
        set_nice(RAISED);
        nice() == RAISED
    });
    raised.join().unwrap_or(false)
}

/// The parameters of one measurement.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Whether memfold's pools may use huge pages.
    huge_pages: bool,
    megabytes: usize,
    threads: usize,
    compactor: bool,
    busy: bool,
}

impl Case {
    /// Threads that keep the CPUs busy.
    fn spinners(self) -> usize {
        if self.busy {
            thread::available_parallelism().map_or(1, usize::from)
        } else {
            0
        }
    }
}

/// The result of one run.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    caller_ns: f64,
    cpu_ns: f64,
    returned_ms: f64,
    whole_ms: f64,
}

/// Measures all variants in all cases.
pub fn run(options: &Options) -> Result<Report> {
    let mut report = Report::new("free");
    let may_raise = LazyCell::new(may_raise);
    let (variants, refused): (Vec<_>, Vec<_>) = options
        .named("variant", &VARIANTS)?
        .into_iter()
        .partition(|(_, variant)| !variant.raises() || *may_raise);
    let runs = options.number("runs", 5)?.max(1);
    let sizes = trace::mixed_lz4();
    for case in cases(options)? {
        // Alternate the variants, so that disturbances of the machine affect all of them.
        let (mut floor, mut shared_floor) = (Samples::default(), Samples::default());
        let mut samples = vec![<[Samples; 4]>::default(); variants.len()];
        for _ in 0..runs {
            floor.push(time_of_discard(case.megabytes << 20, &sizes, Floor::Alone)?);
            let shared = Floor::Shared { busy: case.busy };
            shared_floor.push(time_of_discard(case.megabytes << 20, &sizes, shared)?);
            for ((_, variant), samples) in variants.iter().zip(&mut samples) {
                let outcome = measure(*variant, case, &sizes)?;
                samples[0].push(outcome.caller_ns);
                samples[1].push(outcome.cpu_ns);
                samples[2].push(outcome.returned_ms);
                samples[3].push(outcome.whole_ms);
            }
        }
        for ((name, variant), [caller, cpu, returned, whole]) in variants.iter().zip(&samples) {
            report.add(
                Row::new()
                    .with("variant", *name)
                    .with("megabytes", case.megabytes)
                    .with("threads", case.threads)
                    .with("compactor", case.compactor)
                    .with("huge_pages", case.huge_pages)
                    .with("cpus", if case.busy { "busy" } else { "idle" })
                    .measured("caller_ns_per_free", caller)
                    .measured("cpu_ns_per_free", cpu)
                    .measured("returned_ms", returned)
                    .measured("whole_ms", whole)
                    .with("floor_ms", rounded(floor.median()))
                    .with("shared_floor_ms", rounded(shared_floor.median()))
                    .with("runs", runs)
                    .with("spread", caller.spread())
                    .with("cpu_spread", cpu.spread())
                    .with("published", published(*variant)),
            );
        }
    }
    for (name, _) in refused {
        report.note(format!(
            "SKIPPED {name}: not permitted to set the nice value {RAISED} (run as root, or raise ulimit -e)."
        ));
    }
    add_notes(&mut report);
    Ok(report)
}

fn add_notes(report: &mut Report) {
    report.note(format!(
        "deferred-raised, bulk-raised: the drainer and its helpers run with nice {RAISED}, so that \
         busy CPUs do not delay them."
    ));
    report.note(
        "pool-lock-kept: as pool-lock, but freed zspages are kept for reuse, as the kernel's go to \
         its page allocator, instead of one madvise() each; its returned_ms ends when they can be \
         reused.",
    );
    report.note(
        "caller_ns_per_free: wall time of the freeing threads; cpu_ns_per_free: CPU time of all \
         threads, helpers included, compactor excluded; returned_ms: from the last free until all \
         memory is freed to the kernel; whole_ms: the same from the first free; floor_ms: one \
         madvise() of as many bytes by one thread, which a variant that does not make the caller \
         wait pays in returned_ms; shared_floor_ms: the same split among one thread per CPU, with \
         busy CPUs where the row has them.",
    );
    report.note(
        "published (munmap of a swapped range): deferred alone 63.1 -> 18.6 ms on RK3588; class \
         index alone 1.05-1.83x (RPi 4B), 1.19-1.40x (i7-12700) at 1-4 processes; both 2.97-3.47x. \
         CPU time, busy CPUs and compaction were asked for in review and not published.",
    );
}

/// How a bare `madvise()` is timed, as a lower bound.
#[derive(Debug, Clone, Copy)]
enum Floor {
    /// One thread, one call, idle CPUs.
    Alone,
    /// One thread per CPU at once.
    Shared { busy: bool },
}

/// Milliseconds that `madvise()` takes to free as much memory as the objects of `bytes` of pages
/// fill.
fn time_of_discard(bytes: usize, sizes: &[usize], floor: Floor) -> Result<f64> {
    let objects = bytes / PAGE_SIZE;
    let stored: usize = (0..objects).map(|number| sizes[number % sizes.len()]).sum();
    let pages = stored.div_ceil(PAGE_SIZE);
    let start = Mapping.reserve(pages)?;
    for page in 0..pages {
        // SAFETY: the page lies in the mapping, which no other thread refers to.
        unsafe { start.add(page * PAGE_SIZE).write(1) };
    }
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let (parts, spinners) = match floor {
        Floor::Alone => (1, 0),
        Floor::Shared { busy: false } => (cpus, 0),
        Floor::Shared { busy: true } => (cpus, cpus),
    };
    let address = start.as_ptr().expose_provenance();
    let discard = |part: usize| {
        let (first, end) = (pages * part / parts, pages * (part + 1) / parts);
        let start = std::ptr::with_exposed_provenance_mut(address + first * PAGE_SIZE);
        let run = PageRun {
            start: NonNull::new(start).context("a mapping at address zero")?,
            pages: end - first,
        };
        // SAFETY: the run is a part of the reservation, which is unused.
        unsafe { Mapping.discard(&[run]) }.map_err(anyhow::Error::from)
    };
    let stop = AtomicBool::new(false);
    let barrier = Barrier::new(parts + spinners);
    let elapsed = thread::scope(|scope| {
        for _ in 0..spinners {
            scope.spawn(|| {
                barrier.wait();
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let (discard, barrier) = (&discard, &barrier);
        let others: Vec<_> = (1..parts)
            .map(|part| {
                scope.spawn(move || {
                    barrier.wait();
                    discard(part)
                })
            })
            .collect();
        barrier.wait();
        let begin = Instant::now();
        let mut outcome = discard(0);
        for other in others {
            outcome = outcome.and(other.join().unwrap_or_else(|_| bail!("a thread panicked")));
        }
        let elapsed = begin.elapsed();
        stop.store(true, Ordering::Relaxed);
        outcome.map(|()| elapsed)
    })?;
    // SAFETY: it was reserved above, and no reference to it is left.
    unsafe { Mapping.unreserve(start, pages) };
    Ok(elapsed.as_secs_f64() * 1e3)
}

/// Published speed-up of a step over the original, in wall time of the caller.
fn published(variant: Variant) -> serde_json::Value {
    match variant {
        Variant::Original(Step::ClassIndex) => "1.05-1.83x (RPi 4B), 1.19-1.40x (i7-12700)".into(),
        Variant::Deferred(_) => "2.97-3.47x (64-512 MB)".into(),
        _ => serde_json::Value::Null,
    }
}

fn cases(options: &Options) -> Result<Vec<Case>> {
    let flags = |name: &str, default: &str, yes: &str, no: &str| -> Result<Vec<bool>> {
        options
            .list(name, default)
            .into_iter()
            .map(|value| match value {
                value if value == yes => Ok(true),
                value if value == no => Ok(false),
                other => bail!("--{name} takes {yes} or {no}, not {other:?}"),
            })
            .collect()
    };
    let compactors = flags("compactor", "off,on", "on", "off")?;
    let cpus = flags("cpus", "idle,busy", "busy", "idle")?;
    let huge_pages = flags("huge-pages", "on", "on", "off")?;
    let threads = options.numbers("threads", "1,2,4")?;
    let mut cases = Vec::new();
    for megabytes in options.numbers("megabytes", "64,128,256,512")? {
        ensure!(
            (1..=2048).contains(&megabytes),
            "--megabytes takes 1 to 2048"
        );
        for &threads in &threads {
            ensure!((1..=64).contains(&threads), "--threads takes 1 to 64");
            for (&compactor, &huge_pages) in compactors
                .iter()
                .flat_map(|compactor| huge_pages.iter().map(move |huge| (compactor, huge)))
            {
                cases.extend(cpus.iter().map(|&busy| Case {
                    huge_pages,
                    megabytes,
                    threads,
                    compactor,
                    busy,
                }));
            }
        }
    }
    Ok(cases)
}

/// What the experiment needs of a variant.
trait Allocator: Send + Sync {
    fn store(&self, number: usize, bytes: &[u8]) -> Result<()>;
    /// Frees a range of objects in the way of this variant.
    fn free(&self, numbers: std::ops::Range<usize>);
    fn compact(&self, go_on: &dyn Fn() -> bool);
    fn resident_bytes(&self) -> usize;
}

impl Allocator for Original {
    fn store(&self, number: usize, bytes: &[u8]) -> Result<()> {
        Original::store(self, number, bytes)
    }

    fn free(&self, numbers: std::ops::Range<usize>) {
        numbers.for_each(|number| Original::free(self, number));
    }

    fn compact(&self, go_on: &dyn Fn() -> bool) {
        Original::compact(self, go_on);
    }

    fn resident_bytes(&self) -> usize {
        Original::resident_bytes(self)
    }
}

/// memfold's pool.
struct Ours {
    pool: Arc<Pool<Mapping>>,
    words: Words,
    variant: Variant,
    _drainer: Option<Drainer>,
}

impl Ours {
    fn new(variant: Variant, case: Case, objects: usize) -> Result<Self> {
        let with_drainer = variant != Variant::BulkAlone;
        let mut config = Config::with_capacity_pages(1 << 22);
        if !case.huge_pages {
            config = config.spare_part(0);
        }
        // Room for all that is freed at once, whichever threads do it.
        config = config.deferred_bytes(if with_drainer {
            case.megabytes << 22
        } else {
            0
        });
        let pool = Arc::new(Pool::new(Mapping, config)?);
        let drainer = with_drainer
            .then(|| Drainer::spawn_with(pool.clone(), move || variant.prepare_drainer()))
            .transpose()?;
        Ok(Self {
            pool,
            words: Words::new(objects),
            variant,
            _drainer: drainer,
        })
    }
}

impl Allocator for Ours {
    fn store(&self, number: usize, bytes: &[u8]) -> Result<()> {
        let size = bytes.len().min(PAGE_SIZE - NUMBER_BYTES);
        let word = self.pool.store(&[&Words::head(number), &bytes[..size]])?;
        self.words.put(number, word);
        Ok(())
    }

    fn free(&self, numbers: std::ops::Range<usize>) {
        if let Variant::Deferred(_) = self.variant {
            for number in numbers {
                if let Some(word) = self.words.take(number) {
                    self.pool.free_deferred(word);
                }
            }
            return;
        }
        let mut words = Vec::with_capacity(BULK.min(numbers.len()));
        for start in numbers.clone().step_by(BULK) {
            let end = numbers.end.min(start + BULK);
            words.extend((start..end).filter_map(|number| self.words.take(number)));
            self.pool.free_bulk(&mut words);
            words.clear();
        }
        if self.variant == Variant::BulkAlone {
            self.pool.trim();
        }
    }

    fn compact(&self, go_on: &dyn Fn() -> bool) {
        self.pool.compact(&self.words, go_on);
    }

    fn resident_bytes(&self) -> usize {
        self.pool.resident_bytes()
    }
}

fn measure(variant: Variant, case: Case, sizes: &[usize]) -> Result<Outcome> {
    let objects = case.megabytes * (1 << 20) / PAGE_SIZE;
    let allocator: Box<dyn Allocator> = match variant {
        Variant::Original(step) => Box::new(Original::new(step, objects * 3 / 2 + 4096, objects)?),
        ours => Box::new(Ours::new(ours, case, objects)?),
    };
    let allocator = &*allocator;
    let part = objects / case.threads;
    let range = |thread: usize| thread * part..(thread + 1) * part;
    fill(allocator, case, sizes, &range)?;
    let stored = allocator.resident_bytes();
    ensure!(stored > 0, "nothing was stored");

    let stop = AtomicBool::new(false);
    let go_on = || !stop.load(Ordering::Relaxed);
    let disturbers = usize::from(case.compactor) + case.spinners();
    let start = Barrier::new(case.threads + disturbers + 1);
    thread::scope(|scope| {
        let subtracted = disturb(scope, case, allocator, &start, &go_on);
        let callers: Vec<_> = (0..case.threads)
            .map(|thread| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let begin = Instant::now();
                    allocator.free(range(thread));
                    begin.elapsed()
                })
            })
            .collect();
        let before = process_cpu();
        start.wait();
        let first_free = Instant::now();
        let ended = callers.into_iter().map(ScopedJoinHandle::join);
        let caller_time: Duration = ended.map(|time| time.unwrap_or(Duration::MAX)).sum();
        let last_free = Instant::now();
        // CPU time of the polling below is subtracted too.
        let before_polling = thread_cpu();
        while allocator.resident_bytes() > 0 && last_free.elapsed() < TIMEOUT {
            thread::sleep(Duration::from_micros(100));
        }
        let returned = last_free.elapsed();
        let whole = first_free.elapsed();
        let polling = thread_cpu().saturating_sub(before_polling);
        let back = allocator.resident_bytes() == 0;
        stop.store(true, Ordering::Relaxed);
        let ended = subtracted.into_iter().map(ScopedJoinHandle::join);
        let not_counted: Duration = ended.map(Result::unwrap_or_default).sum();
        let cpu = process_cpu()
            .saturating_sub(before)
            .saturating_sub(not_counted + polling);
        ensure!(
            back,
            "the pool did not free its memory within {} s",
            TIMEOUT.as_secs()
        );
        let frees = (part * case.threads) as f64;
        Ok(Outcome {
            caller_ns: caller_time.as_nanos() as f64 / frees,
            cpu_ns: cpu.as_nanos() as f64 / frees,
            returned_ms: returned.as_secs_f64() * 1e3,
            whole_ms: whole.as_secs_f64() * 1e3,
        })
    })
}

/// Starts the threads whose CPU time is subtracted: the compactor, and what keeps the CPUs busy.
fn disturb<'scope>(
    scope: &'scope Scope<'scope, '_>,
    case: Case,
    allocator: &'scope dyn Allocator,
    start: &'scope Barrier,
    go_on: &'scope (dyn Fn() -> bool + Sync),
) -> Vec<ScopedJoinHandle<'scope, Duration>> {
    let compact = move || {
        while go_on() {
            allocator.compact(go_on);
        }
    };
    let spin = move || {
        while go_on() {
            std::hint::spin_loop();
        }
    };
    let compactor = case
        .compactor
        .then(|| scope.spawn(move || subtracted_time(start, compact)));
    let spinners = (0..case.spinners()).map(|_| scope.spawn(move || subtracted_time(start, spin)));
    compactor.into_iter().chain(spinners).collect()
}

/// Stores every thread's objects, in clusters in random order.
fn fill(
    allocator: &dyn Allocator,
    case: Case,
    sizes: &[usize],
    range: &(dyn Fn(usize) -> std::ops::Range<usize> + Sync),
) -> Result<()> {
    let store = |thread: usize| -> Result<()> {
        let numbers = range(thread);
        let mut clusters: Vec<usize> = numbers.clone().step_by(CLUSTER).collect();
        Random::new(thread as u64 + 1).shuffle(&mut clusters);
        let bytes = [0x5a; PAGE_SIZE];
        for first in clusters {
            for number in first..numbers.end.min(first + CLUSTER) {
                allocator.store(number, &bytes[..sizes[number % sizes.len()]])?;
            }
        }
        Ok(())
    };
    let store = &store;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..case.threads)
            .map(|thread| scope.spawn(move || store(thread)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => bail!("a storing thread panicked"),
            })
    })
}

/// Runs `work` after the barrier and returns its CPU time.
fn subtracted_time(start: &Barrier, work: impl FnOnce()) -> Duration {
    start.wait();
    let before = thread_cpu();
    work();
    thread_cpu().saturating_sub(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_frees_all_memory() {
        let sizes = trace::mixed_lz4();
        for (name, variant) in VARIANTS {
            for (compactor, busy) in [(false, false), (true, true)] {
                let case = Case {
                    huge_pages: true,
                    megabytes: 4,
                    threads: 2,
                    compactor,
                    busy,
                };
                let outcome = measure(variant, case, &sizes).unwrap();
                assert!(outcome.caller_ns > 0.0 && outcome.cpu_ns > 0.0, "{name}");
            }
        }
    }
}
