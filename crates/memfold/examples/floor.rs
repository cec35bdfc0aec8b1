//! What a swap-in in signal mode cannot be below, part by part, and what the library takes on top.
//!
//! ```sh
//! cargo run --release -p memfold --example floor -- [--megabytes 128] [--runs 7]
//! ```
//!
//! Each part is measured by itself with the same pages, in turn with the others, and printed as a
//! table in Markdown: nanoseconds of the thread's CPU time a page, medians, and spread (largest by
//! smallest).

mod common;

use memfold::{Memfold, Mode, Region};
use memfold_swap::{Page, Scratch, Slot, SwapConfig, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::reserve::Reservation;
use memfold_sys::uffd::{FEATURE_SIGBUS, Uffd};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use zsmalloc::HeapSource;

/// The library's window of a sequential stream.
const WINDOW: usize = 16;

/// Faults that the empty handler still has to let happen again before it ends the series.
static FAULTS_LEFT: AtomicUsize = AtomicUsize::new(0);
static UFFD: AtomicU64 = AtomicU64::new(0);

/// Returns without serving the fault, so that it happens again; serves the last one of a series.
extern "C" fn empty_handler(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if FAULTS_LEFT.fetch_sub(1, Relaxed) == 1 {
        // SAFETY: the kernel's own information about the fault.
        let page = unsafe { (*info).si_addr() } as u64 & !(PAGE_SIZE as u64 - 1);
        Uffd(UFFD.load(Relaxed) as i32)
            .zero(page, PAGE_SIZE as u64)
            .expect("the page is missing");
    }
}

/// Words of a small vocabulary, as programs' heaps are full of, and some noise.
fn fill(page: &mut Page, seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for word in page.chunks_exact_mut(8) {
        let number = random();
        let value = match number % 16 {
            0..=10 => (number >> 8) % 32 * 0x0001_0204_0811,
            11 | 12 => 0x7f00_0000_0000 | (number >> 20 & 0xff_fff8),
            13 | 14 => number >> 58,
            _ => number.rotate_left(17),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn page_of(seed: usize) -> Box<Page> {
    let mut page = Box::new([0; PAGE_SIZE]);
    fill(&mut page, seed as u64 + 1);
    page
}

/// All pages in an order without pattern.
fn shuffled(pages: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pages).collect();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for index in (1..pages).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(index, state as usize % (index + 1));
    }
    order
}

/// The CPU time of the calling thread. Unlike the clock on the wall it is the same
/// where other programs are busy.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: fills a live structure.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Nanoseconds of the calling thread for each of `pages`.
fn each(pages: usize, run: impl FnOnce()) -> f64 {
    let start = cpu_time();
    run();
    cpu_time().saturating_sub(start).as_secs_f64() * 1e9 / pages as f64
}

/// Pages as LZ4 leaves them, one behind the other.
struct Compressed {
    bytes: Vec<u8>,
    places: Vec<std::ops::Range<usize>>,
}

impl Compressed {
    fn new(pages: usize) -> Self {
        let mut all = Compressed {
            bytes: Vec::new(),
            places: Vec::new(),
        };
        let mut buffer = [0_u8; 2 * PAGE_SIZE];
        for number in 0..pages {
            let page = page_of(number);
            // SAFETY: pointers and lengths of two live buffers.
            let length = unsafe {
                lz4_sys::LZ4_compress_fast(
                    page.as_ptr().cast(),
                    buffer.as_mut_ptr().cast(),
                    PAGE_SIZE as i32,
                    buffer.len() as i32,
                    1,
                )
            };
            let start = all.bytes.len();
            all.bytes.extend_from_slice(&buffer[..length as usize]);
            all.places.push(start..all.bytes.len());
        }
        all
    }

    fn decompress(&self, number: usize, out: &mut Page) {
        let bytes = &self.bytes[self.places[number].clone()];
        // SAFETY: as above.
        let length = unsafe {
            lz4_sys::LZ4_decompress_safe(
                bytes.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                bytes.len() as i32,
                PAGE_SIZE as i32,
            )
        };
        assert_eq!(length, PAGE_SIZE as i32);
    }
}

/// Memory registered with a userfaultfd of our own.
struct Missing {
    uffd: Uffd,
    memory: Reservation,
}

impl Missing {
    fn new(pages: usize) -> Self {
        let uffd = Uffd::create_for_user_mode().expect("a userfaultfd");
        uffd.api(FEATURE_SIGBUS).expect("SIGBUS for missing pages");
        let memory = Reservation::new(pages * PAGE_SIZE, 2 << 20).expect("addresses");
        memory.make_anonymous(0).expect("memory");
        uffd.register(memory.start().as_ptr() as u64, memory.length() as u64)
            .expect("registered");
        Missing { uffd, memory }
    }

    fn address(&self, page: usize) -> *mut u8 {
        // SAFETY: within the reservation.
        unsafe { self.memory.start().as_ptr().add(page * PAGE_SIZE) }
    }

    fn clear(&self) {
        // SAFETY: the contents are of no use.
        unsafe { memfold_sys::memory::discard(self.memory.start(), self.memory.length()) }
            .expect("dropped");
    }

    /// A fault, the delivery of its signal, and the return from a handler that does nothing.
    fn fault_and_signal(&self, faults: usize) -> f64 {
        // SAFETY: a handler of the type that SA_SIGINFO asks for, that blocks all signals as the
        // library's does; what was there is put back below.
        let before = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let mut before: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = empty_handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigfillset(&raw mut action.sa_mask);
            assert_eq!(
                libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before),
                0
            );
            before
        };
        UFFD.store(self.uffd.0 as u64, Relaxed);
        FAULTS_LEFT.store(faults, Relaxed);
        // SAFETY: a missing page of ours, which the handler fills in the end.
        let taken = each(faults, || unsafe {
            black_box(self.address(0).read_volatile());
        });
        // SAFETY: what was installed before.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const before, std::ptr::null_mut()) };
        self.clear();
        taken
    }

    /// Copying into missing pages, `window` of them a call.
    fn copy(&self, order: &[usize], window: usize) -> f64 {
        let source = vec![1_u8; window * PAGE_SIZE];
        let taken = each(order.len() * window, || {
            for &page in order {
                self.uffd
                    .copy_in(
                        self.address(page * window) as u64,
                        &source,
                        source.len() as u64,
                    )
                    .expect("the pages are missing");
            }
        });
        self.clear();
        taken
    }
}

/// The library's memory, all of it out.
fn swap_in(region: &mut Region, order: impl Iterator<Item = usize>, pages: usize) -> f64 {
    let out = region.page_out(..).expect("the whole region");
    assert_eq!(out as usize, pages * PAGE_SIZE);
    let start = region.base().as_ptr();
    each(pages, || {
        for page in order {
            // SAFETY: within the region.
            black_box(unsafe { start.add(page * PAGE_SIZE).read_volatile() });
        }
    })
}

fn region(memfold: &Memfold, pages: usize) -> Region {
    let mut region = memfold.map(pages * PAGE_SIZE).expect("addresses");
    for (number, page) in region.chunks_exact_mut(PAGE_SIZE).enumerate() {
        page.copy_from_slice(&page_of(number)[..]);
    }
    region
}

/// One round of all parts, in the order of [`NAMES`].
fn round(bench: &mut Bench) -> [f64; PARTS] {
    let (pages, order) = (bench.pages, &bench.order);
    let mut page = Box::new([0; PAGE_SIZE]);
    let windows: Vec<usize> = (0..pages / WINDOW).collect();
    let decompress = |order: &mut dyn Iterator<Item = usize>, page: &mut Page| {
        each(pages, || {
            order.for_each(|number| bench.compressed.decompress(number, black_box(page)));
        })
    };
    let mut load = |order: &mut dyn Iterator<Item = usize>, page: &mut Page| {
        each(pages, || {
            for number in order {
                let slot = bench.slots[number];
                let loaded = bench.space.load(slot, black_box(page), &mut bench.scratch);
                loaded.expect("what was stored");
            }
        })
    };
    [
        bench.missing.fault_and_signal(pages),
        bench.missing.copy(order, 1),
        decompress(&mut order.iter().copied(), &mut page),
        load(&mut order.iter().copied(), &mut page),
        swap_in(&mut bench.alone, order.iter().copied(), pages),
        bench.missing.copy(&windows, WINDOW),
        decompress(&mut (0..pages), &mut page),
        load(&mut (0..pages), &mut page),
        swap_in(&mut bench.alone, 0..pages, pages),
        swap_in(&mut bench.ahead, 0..pages, pages),
    ]
}

const PARTS: usize = 10;

struct Bench {
    pages: usize,
    order: Vec<usize>,
    missing: Missing,
    compressed: Compressed,
    space: SwapSpace<HeapSource>,
    slots: Vec<Slot>,
    scratch: Scratch,
    /// Without readahead.
    alone: Region,
    ahead: Region,
}

impl Bench {
    fn new(pages: usize) -> Self {
        let room = (pages * PAGE_SIZE) as u64 * 4 + (64 << 20);
        let memfold = |readahead| {
            let builder = Memfold::builder().mode(Mode::Signal).readahead(readahead);
            builder.resident_limit(room).build().expect("signal mode")
        };
        let config = SwapConfig {
            pool_capacity_pages: pages.next_power_of_two() * 2,
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).expect("a swap space");
        let mut scratch = Scratch::new();
        let store = |number| space.store(&page_of(number), &mut scratch).expect("room");
        let slots = (0..pages).map(store).collect();
        Bench {
            pages,
            order: shuffled(pages),
            missing: Missing::new(pages),
            compressed: Compressed::new(pages),
            space,
            slots,
            scratch,
            alone: region(&memfold(false), pages),
            ahead: region(&memfold(true), pages),
        }
    }
}

fn median(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    (
        values[values.len() / 2],
        values[values.len() - 1] / values[0],
    )
}

fn main() {
    let numbers = common::numbers([("--megabytes", 128_usize), ("--runs", 7)]);
    let [megabytes, runs] = numbers.map(|number| number.max(1));
    let mut bench = Bench::new(megabytes << 8);
    // Memory that the host never gave to this machine is slow once.
    round(&mut bench);
    let rounds: Vec<_> = (0..runs).map(|_| round(&mut bench)).collect();
    let part = |index: usize| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[index]).collect();
        median(&mut values)
    };
    let ratio = bench.compressed.bytes.len() as f64 / (bench.pages * PAGE_SIZE) as f64;
    println!(
        "{megabytes} MiB, {runs} runs, compressed to {ratio:.2}; ns of CPU time a page (spread)\n"
    );
    println!("| part | random, a page a fault | sequential, {WINDOW} pages a fault |");
    println!("|---|---|---|");
    let row = |name: &str, random: (f64, f64), sequential: (f64, f64)| {
        println!(
            "| {name} | {:.0} ({:.2}) | {:.0} ({:.2}) |",
            random.0, random.1, sequential.0, sequential.1
        );
    };
    let signal = part(0);
    let shared = (signal.0 / WINDOW as f64, signal.1);
    row(
        "fault, signal, return from an empty handler",
        signal,
        shared,
    );
    row("copy into a missing page (`UFFDIO_COPY`)", part(1), part(5));
    row("decompression (LZ4 alone)", part(2), part(6));
    let floor = [
        signal.0 + part(1).0 + part(2).0,
        shared.0 + part(5).0 + part(6).0,
    ];
    println!("| **floor** | **{:.0}** | **{:.0}** |", floor[0], floor[1]);
    let beside = |load: usize, raw: usize| part(load).0 - part(raw).0;
    let found = [beside(3, 2), beside(7, 6)];
    println!(
        "| slot, pool and checksum (a load, less its decompression) | {:.0} | {:.0} |",
        found[0], found[1]
    );
    let total = [part(4), part(8)];
    println!(
        "| states, account, stack, window, release (the rest) | {:.0} | {:.0} |",
        total[0].0 - floor[0] - found[0],
        total[1].0 - floor[1] - found[1]
    );
    row("**the library, readahead off**", total[0], total[1]);
    let ahead = part(9);
    println!(
        "| the library, readahead on: the program's thread alone | | {:.0} ({:.2}) |",
        ahead.0, ahead.1
    );
}
