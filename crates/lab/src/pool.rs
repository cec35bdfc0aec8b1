//! Resident memory per stored byte, beside general allocators that hold the same objects.
//!
//! Each variant runs in its own process. Its memory is the growth of the process's anonymous pages
//! since before the first object, metadata and slack included.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use zsmalloc::{Config, PAGE_SIZE, Pool};

use crate::{
    Options,
    mapping::Mapping,
    random::Random,
    report::{Report, Row, anonymous_bytes, rounded},
    trace::{TRACES, Trace},
    words::{NUMBER_BYTES, Words},
};

/// The hidden subcommand that measures one variant.
pub const CHILD: &str = "pool-child";

const VARIANTS: [&str; 3] = ["zsmalloc", "mimalloc", "jemalloc"];

/// Objects held at the peak. More make the fixed costs of an allocator smaller.
const OBJECTS: usize = 65_536;

/// Rounds of churn after the peak. More fragment the pools further.
const CHURN_ROUNDS: usize = 10;
/// Objects replaced in each round.
const CHURN_PART: usize = OBJECTS / 5;

/// Measures every variant on every trace.
pub fn run(options: &Options) -> Result<Report> {
    let all: Vec<&str> = TRACES.iter().map(|trace| trace.name).collect();
    let all = all.join(",");
    let mut report = Report::new("pool");
    for trace in options.list("trace", &all) {
        Trace::find(trace)?;
        for variant in VARIANTS {
            for (phase, ratio) in measure_in_child(variant, trace)? {
                report.add(
                    Row::new()
                        .with("variant", variant)
                        .with("trace", trace)
                        .with("phase", phase)
                        .with("resident_per_stored", rounded(ratio))
                        .with("runs", 1)
                        .with("spread", 1.0),
                );
            }
        }
    }
    report.note(
        "resident_per_stored: anonymous memory of the process over the bytes of the objects. churn: \
         after most objects were replaced; half-freed: right after a random half was freed; \
         compacted: after compaction, or the allocator's purge. Sizes and order are the same in \
         every run.",
    );
    Ok(report)
}

fn measure_in_child(variant: &str, trace: &str) -> Result<Vec<(String, f64)>> {
    let program = std::env::current_exe()?;
    let output = Command::new(program)
        .args([CHILD, "--variant", variant, "--trace", trace])
        .stderr(std::process::Stdio::inherit())
        .output()?;
    ensure!(
        output.status.success(),
        "the process for {variant} failed: {}",
        output.status
    );
    String::from_utf8(output.stdout)?
        .lines()
        .map(|line| {
            let (phase, ratio) = line.split_once(' ').context("a line without a figure")?;
            Ok((phase.to_owned(), ratio.parse()?))
        })
        .collect()
}

/// An allocator under test; objects are known by number.
trait Holder {
    fn store(&mut self, number: usize, size: usize) -> Result<()>;
    fn free(&mut self, number: usize);
    /// Frees as much memory to the kernel as possible.
    fn compact(&mut self);
}

/// The child process: prints the ratio after each phase.
pub fn run_child(options: &Options) -> Result<()> {
    let trace = Trace::find(options.value("trace").context("--trace is missing")?)?;
    let sizes = trace.sizes();
    match options.value("variant").context("--variant is missing")? {
        "zsmalloc" => measure(&sizes, InPool::new),
        "mimalloc" => measure(&sizes, || Ok(General::new(&MIMALLOC))),
        "jemalloc" => measure(&sizes, || Ok(General::new(&JEMALLOC))),
        other => bail!("unknown variant {other:?}"),
    }
}

fn measure<H: Holder>(trace: &[usize], make: impl FnOnce() -> Result<H>) -> Result<()> {
    let mut random = Random::new(17);
    // Touch the harness's own memory before the base is taken.
    let mut sizes: Vec<usize> = (0..OBJECTS)
        .map(|number| trace[number % trace.len()])
        .collect();
    let mut order: Vec<usize> = (0..OBJECTS).collect();
    anonymous_bytes()?;
    let base = anonymous_bytes()?;
    let mut holder = make()?;
    let report = |phase: &str, stored: usize| -> Result<()> {
        let taken = anonymous_bytes()?.saturating_sub(base);
        println!("{phase} {}", taken as f64 / stored as f64);
        Ok(())
    };
    for (number, &size) in sizes.iter().enumerate() {
        holder.store(number, size)?;
    }
    report("peak", sizes.iter().sum())?;
    for _ in 0..CHURN_ROUNDS {
        random.shuffle(&mut order);
        order[..CHURN_PART]
            .iter()
            .for_each(|&number| holder.free(number));
        for &number in &order[..CHURN_PART] {
            sizes[number] = trace[random.below(trace.len())];
            holder.store(number, sizes[number])?;
        }
    }
    report("churn", sizes.iter().sum())?;
    random.shuffle(&mut order);
    let (freed, kept) = order.split_at(OBJECTS / 2);
    freed.iter().for_each(|&number| holder.free(number));
    let left = kept.iter().map(|&number| sizes[number]).sum();
    report("half-freed", left)?;
    holder.compact();
    report("compacted", left)
}

/// memfold's pool.
struct InPool {
    pool: Pool<Mapping>,
    words: Words,
}

impl InPool {
    fn new() -> Result<Self> {
        let config = Config::with_capacity_pages(1 << 20).shards(1);
        Ok(Self {
            pool: Pool::new(Mapping, config)?,
            words: Words::new(OBJECTS),
        })
    }
}

impl Holder for InPool {
    fn store(&mut self, number: usize, size: usize) -> Result<()> {
        let bytes = [0x5a; PAGE_SIZE];
        // An incompressible page has no room for the number. It takes a page of its own, which
        // compaction never moves, so the number is never read.
        let word = if size + NUMBER_BYTES <= PAGE_SIZE {
            self.pool.store(&[&Words::head(number), &bytes[..size]])?
        } else {
            self.pool
                .store(&[&[0xff; NUMBER_BYTES], &bytes[..size - NUMBER_BYTES]])?
        };
        self.words.put(number, word);
        Ok(())
    }

    fn free(&mut self, number: usize) {
        if let Some(word) = self.words.take(number) {
            self.pool.free(word);
        }
    }

    fn compact(&mut self) {
        self.pool.compact(&self.words, || true);
        self.pool.trim();
    }
}

/// The functions of a general allocator.
struct Allocator {
    malloc: unsafe extern "C" fn(usize) -> *mut libc::c_void,
    free: unsafe extern "C" fn(*mut libc::c_void),
    collect: fn(),
}

const MIMALLOC: Allocator = Allocator {
    malloc: libmimalloc_sys::mi_malloc,
    free: libmimalloc_sys::mi_free,
    // SAFETY: the call has no preconditions.
    collect: || unsafe { libmimalloc_sys::mi_collect(true) },
};

const JEMALLOC: Allocator = Allocator {
    malloc: tikv_jemalloc_sys::malloc,
    free: tikv_jemalloc_sys::free,
    collect: jemalloc_purge,
};

fn jemalloc_purge() {
    // 4096 is MALLCTL_ARENAS_ALL.
    let name = c"arena.4096.purge";
    // SAFETY: the name is NUL-terminated, and this control takes and returns no data.
    let result = unsafe {
        tikv_jemalloc_sys::mallctl(
            name.as_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
        )
    };
    assert_eq!(result, 0, "jemalloc has no arena.4096.purge");
}

struct General {
    allocator: &'static Allocator,
    objects: Vec<*mut libc::c_void>,
}

impl General {
    fn new(allocator: &'static Allocator) -> Self {
        Self {
            allocator,
            objects: vec![std::ptr::null_mut(); OBJECTS],
        }
    }
}

impl Holder for General {
    fn store(&mut self, number: usize, size: usize) -> Result<()> {
        // SAFETY: the size is not zero.
        let object = unsafe { (self.allocator.malloc)(size) };
        ensure!(!object.is_null(), "malloc of {size} bytes failed");
        // SAFETY: the allocation has `size` bytes.
        unsafe { object.cast::<u8>().write_bytes(0x5a, size) };
        self.objects[number] = object;
        Ok(())
    }

    fn free(&mut self, number: usize) {
        let object = std::mem::replace(&mut self.objects[number], std::ptr::null_mut());
        // SAFETY: this allocator returned the pointer, or it is null, and the table forgets it
        // here.
        unsafe { (self.allocator.free)(object) };
    }

    fn compact(&mut self) {
        (self.allocator.collect)();
    }
}

impl Drop for General {
    fn drop(&mut self) {
        (0..OBJECTS).for_each(|number| self.free(number));
    }
}
