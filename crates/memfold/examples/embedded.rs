//! Measures memfold against the kernel's zram with the same data in one run, and prints JSON.
//!
//! ```sh
//! cargo run --release -p memfold --example embedded -- [--megabytes 256] [--runs 5] [--no-zram]
//! ```
//!
//! One page is touched at a time, a word of it. Times are of the thread that does it, in
//! microseconds a page; processor time is that of all threads, and for the kernel that of the
//! calling thread, which does all the work there.

#[path = "embedded/kernel.rs"]
mod kernel;
#[path = "embedded/parts.rs"]
mod parts;

use memfold::{Memfold, Region};
use serde_json::{Value, json};
use std::time::Instant;

const PAGE: usize = 4096;

/// Seconds of processor time of this process, and since.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: fills a live structure.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// What a run of something took.
#[derive(Debug, Clone, Copy)]
struct Taken {
    seconds: f64,
    cpu: f64,
}

fn measure(run: impl FnOnce()) -> Taken {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    run();
    Taken {
        seconds: start.elapsed().as_secs_f64(),
        cpu: cpu_seconds() - cpu,
    }
}

/// Data that LZ4 compresses to a little under a half: words of a small vocabulary, as programs'
/// heaps are full of, and noise.
pub fn fill(bytes: &mut [u8], seed: u64) {
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for word in bytes.chunks_exact_mut(8) {
        let number = random();
        let value = match number % 16 {
            0..=6 => (number >> 8) % 64 * 0x0001_0204_0811,
            7..=9 => 0x7f00_0000_0000 | (number >> 20 & 0xff_fff8),
            10 | 11 => number >> 52,
            _ => number.rotate_left(17),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The order of pages of a random walk through all of them.
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

fn touch(start: *const u8, order: impl Iterator<Item = usize>) {
    for page in order {
        // SAFETY: pages of a live mapping of the caller's.
        std::hint::black_box(unsafe { start.add(page * PAGE).read_volatile() });
    }
}

/// One of the two contestants, with its memory filled.
trait Memory {
    fn start(&self) -> *mut u8;
    fn page_out(&mut self);
    fn unmap(self: Box<Self>);
}

struct Ours(Region);

impl Memory for Ours {
    fn start(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn page_out(&mut self) {
        let out = self.0.page_out(..).expect("the whole region");
        assert!(out as usize <= self.0.len());
    }

    fn unmap(self: Box<Self>) {}
}

type Rows = Vec<(&'static str, &'static str, Taken)>;

/// One round of all workloads over fresh memory.
fn round(name: &'static str, make: &dyn Fn() -> Box<dyn Memory>, pages: usize, rows: &mut Rows) {
    let mut memory = make();
    let order = shuffled(pages);
    for (index, page) in (0..pages).enumerate() {
        // SAFETY: the contestant's memory is as long.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(memory.start().add(page * PAGE), PAGE) };
        fill(bytes, index as u64 * 0x9e37_79b9 + 12345);
    }
    rows.push((name, "embedded-page-out", measure(|| memory.page_out())));
    let start = memory.start();
    let sequential = measure(|| touch(start, 0..pages));
    rows.push((name, "embedded-swap-in-sequential", sequential));
    memory.page_out();
    let random = measure(|| touch(start, order.iter().copied()));
    rows.push((name, "embedded-swap-in-random", random));
    memory.page_out();
    // A column of an array whose rows are seven and a half pages long.
    let strided = measure(|| {
        for column in 0..8 {
            let rows = (0..).map(|row| (row * 60 + column * 8) * PAGE / 8 / PAGE);
            touch(start, rows.take_while(|page| *page < pages));
        }
    });
    rows.push((name, "embedded-swap-in-strided", strided));
    memory.page_out();
    let process = cpu_seconds();
    let unmap = measure(|| memory.unmap());
    // What is left to be done elsewhere counts as processor time of the unmapping.
    std::thread::sleep(std::time::Duration::from_millis(60));
    let cpu = cpu_seconds() - process;
    rows.push((name, "embedded-unmap", Taken { cpu, ..unmap }));
}

fn median(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let spread = values[values.len() - 1] / values[0].max(1e-12);
    (values[values.len() / 2], spread)
}

fn report(rows: &Rows, pages: usize) -> Vec<Value> {
    let workloads = [
        "embedded-page-out",
        "embedded-swap-in-sequential",
        "embedded-swap-in-random",
        "embedded-swap-in-strided",
        "embedded-unmap",
    ];
    let mut out = Vec::new();
    for workload in workloads {
        let of = |name: &str, value: fn(&Taken) -> f64| -> Vec<f64> {
            rows.iter()
                .filter(|(who, what, _)| *who == name && *what == workload)
                .map(|(_, _, taken)| value(taken) * 1e6 / pages as f64)
                .collect()
        };
        let mut figures = Vec::new();
        for name in ["memfold-embedded", "zram:lz4"] {
            let (mut wall, mut cpu) = (of(name, |t| t.seconds), of(name, |t| t.cpu));
            if wall.is_empty() {
                continue;
            }
            let runs = wall.len();
            let ((wall, spread), (cpu, cpu_spread)) = (median(&mut wall), median(&mut cpu));
            figures.push((wall, cpu));
            out.push(json!({
                "contestant": name, "workload": workload, "runs": runs,
                "us_per_page": wall, "spread": spread,
                "cpu_us_per_page": cpu, "cpu_spread": cpu_spread,
            }));
        }
        if let [(wall, cpu), (kernel_wall, kernel_cpu)] = figures[..]
            && let Some(row) = out
                .len()
                .checked_sub(2)
                .and_then(|index| out.get_mut(index))
        {
            row["ratio_to_zram"] = json!(kernel_wall / wall);
            row["cpu_ratio_to_zram"] = json!(kernel_cpu / cpu);
        }
    }
    out
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok())
            .unwrap_or(default)
    };
    let (megabytes, runs) = (number("--megabytes", 256), number("--runs", 5));
    let pages = megabytes << 8;
    if arguments.iter().any(|argument| argument == "--parts") {
        println!("{:#}", parts::measure(pages));
        return;
    }
    let zram = if arguments.iter().any(|argument| argument == "--no-zram") {
        None
    } else {
        match kernel::Zram::new(megabytes * 2) {
            Ok(zram) => Some(zram),
            Err(error) => {
                eprintln!("no zram to compare with: {error}");
                None
            }
        }
    };
    let memfold = Memfold::builder()
        .limit((megabytes as u64 + 512) << 21)
        .build()
        .expect("a limit above everything");
    let ours = || -> Box<dyn Memory> {
        let region = memfold.map(pages * PAGE).expect("room for a region");
        Box::new(Ours(region))
    };
    let theirs = || -> Box<dyn Memory> { Box::new(kernel::Mapped::new(pages * PAGE)) };
    let mut rows = Rows::new();
    // A first round warms up memory that the host has never given to this machine.
    for turn in 0..=runs {
        if turn == 1 {
            rows.clear();
        }
        round("memfold-embedded", &ours, pages, &mut rows);
        memfold.settle();
        if zram.is_some() {
            round("zram:lz4", &theirs, pages, &mut rows);
        }
    }
    println!(
        "{:#}",
        json!({
            "experiment": "embedded", "megabytes": megabytes, "mode": memfold.mode().name(),
            "rows": report(&rows, pages),
        })
    );
}
