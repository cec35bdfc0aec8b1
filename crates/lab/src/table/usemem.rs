//! A model of usemem: each thread touches all of its memory repeatedly with frames for half of it,
//! over a swap device in memory, and frees it at the end.

use std::{
    collections::VecDeque,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use memfold_swap::{PAGE_SIZE, Page, Scratch, Slot, SlotRange, SlotRanges};

use crate::{baselines::SwapDesign, clock, random::Random};

/// Pages per reclaim batch (the kernel's `SWAP_CLUSTER_MAX`).
const RECLAIMED_TOGETHER: usize = 32;

/// The order in which pages are touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Ascending,
    Random,
}

/// The work of each thread.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// Pages of memory; there are frames for half of them.
    pub pages: usize,
    /// Passes over the memory after the first.
    pub passes: usize,
    /// The order of each pass.
    pub order: Order,
    /// Initial contents, used cyclically.
    pub contents: &'a [Page],
}

/// The result of a run.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// Memory touched, in MiB per second over all threads.
    pub megabytes_per_second: f64,
    /// Pages swapped out or in, per microsecond over all threads.
    pub moved_per_microsecond: f64,
    /// CPU time of the process from the first touch to the last free.
    pub cpu: Duration,
    /// From the first touch to the last free.
    pub whole: Duration,
    /// Time to free all memory, the slowest thread's.
    pub free: Duration,
}

/// A thread's memory.
struct Memory<'a> {
    design: &'a dyn SwapDesign,
    thread: usize,
    contents: &'a [Page],
    pages: Vec<State>,
    frames: Vec<Page>,
    /// FIFO of (page, frame) in use.
    resident: VecDeque<(usize, usize)>,
    unused: Vec<usize>,
    scratch: Scratch,
    slots: Vec<Slot>,
    moved: usize,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Never,
    Resident(usize),
    Swapped(Slot),
}

impl<'a> Memory<'a> {
    fn new(design: &'a dyn SwapDesign, thread: usize, load: Load<'a>) -> Self {
        let pages = load.pages;
        let frames = (pages / 2).max(RECLAIMED_TOGETHER);
        Self {
            design,
            thread,
            contents: load.contents,
            pages: vec![State::Never; pages],
            // Not zero, so that the frames are faulted in before the clock starts.
            frames: vec![[1; PAGE_SIZE]; frames],
            resident: VecDeque::with_capacity(frames),
            unused: (0..frames).collect(),
            scratch: Scratch::new(),
            slots: Vec::with_capacity(RECLAIMED_TOGETHER),
            moved: 0,
        }
    }

    /// Swaps a page in if necessary, checks its stamp, and writes the stamp of the next pass.
    fn touch(&mut self, page: usize, pass: u64) -> Result<()> {
        let frame = match self.pages[page] {
            State::Resident(frame) => frame,
            state => {
                let frame = match self.unused.pop() {
                    Some(frame) => frame,
                    None => {
                        self.reclaim()?;
                        self.unused.pop().context("reclaim freed no frame")?
                    }
                };
                if let State::Swapped(slot) = state {
                    let frame = &mut self.frames[frame];
                    self.design
                        .load(self.thread, slot, frame, &mut self.scratch)?;
                    self.design.release(self.thread, &[SlotRange::new(slot, 1)]);
                    self.moved += 1;
                } else {
                    self.frames[frame] = self.contents[page % self.contents.len()];
                    write(&mut self.frames[frame], 0, page);
                }
                self.resident.push_back((page, frame));
                self.pages[page] = State::Resident(frame);
                frame
            }
        };
        let frame = &mut self.frames[frame];
        ensure!(
            read(frame) == (pass, page as u64),
            "page {page} read back wrong"
        );
        write(frame, pass + 1, page);
        Ok(())
    }

    fn reclaim(&mut self) -> Result<()> {
        let victims: Vec<_> = self.resident.drain(..RECLAIMED_TOGETHER).collect();
        let frames: Vec<&Page> = victims.iter().map(|&(_, at)| &self.frames[at]).collect();
        self.slots.clear();
        self.design
            .store(self.thread, &frames, &mut self.scratch, &mut self.slots)?;
        for (&(page, frame), &slot) in victims.iter().zip(&self.slots) {
            self.pages[page] = State::Swapped(slot);
            self.unused.push(frame);
        }
        self.moved += victims.len();
        Ok(())
    }

    /// Frees all memory in page order, as munmap does.
    fn free(&mut self) {
        for pages in self.pages.chunks(512) {
            let swapped = pages.iter().filter_map(|page| match page {
                State::Swapped(slot) => Some(*slot),
                _ => None,
            });
            let ranges: SlotRanges = swapped.collect();
            self.design.release(self.thread, ranges.as_slice());
        }
    }
}

fn read(page: &Page) -> (u64, u64) {
    let (words, _) = page.as_chunks::<8>();
    (
        u64::from_le_bytes(words[0]),
        u64::from_le_bytes(words[words.len() - 1]),
    )
}

fn write(page: &mut Page, pass: u64, number: usize) {
    let (words, _) = page.as_chunks_mut::<8>();
    words[0] = pass.to_le_bytes();
    words[words.len() - 1] = (number as u64).to_le_bytes();
}

/// Runs `threads` threads that each do `load`.
pub fn measure(design: &dyn SwapDesign, threads: usize, load: Load<'_>) -> Result<Outcome> {
    let barrier = Barrier::new(threads + 1);
    let outcome = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let barrier = &barrier;
                scope.spawn(move || work(design, thread, load, barrier))
            })
            .collect();
        barrier.wait();
        let (begin, cpu) = (Instant::now(), clock::process_cpu());
        barrier.wait();
        let touched = begin.elapsed();
        barrier.wait();
        let whole = begin.elapsed();
        let cpu = clock::process_cpu().saturating_sub(cpu);
        let mut moved = 0;
        let mut free = Duration::ZERO;
        let count = threads.len();
        for thread in threads {
            let (thread_moved, thread_free) = thread.join().ok().context("a thread panicked")??;
            moved += thread_moved;
            free = free.max(thread_free);
        }
        let bytes = count * load.pages * (load.passes + 1) * PAGE_SIZE;
        anyhow::Ok(Outcome {
            megabytes_per_second: bytes as f64 / f64::from(1 << 20) / touched.as_secs_f64(),
            moved_per_microsecond: moved as f64 / touched.as_secs_f64() / 1e6,
            cpu,
            whole,
            free,
        })
    })?;
    ensure!(
        design.used() == 0,
        "{} slots are still in use",
        design.used()
    );
    Ok(outcome)
}

fn work(
    design: &dyn SwapDesign,
    thread: usize,
    load: Load<'_>,
    barrier: &Barrier,
) -> Result<(usize, Duration)> {
    let mut memory = Memory::new(design, thread, load);
    let mut numbers: Vec<usize> = (0..load.pages).collect();
    if load.order == Order::Random {
        Random::new(thread as u64 + 1).shuffle(&mut numbers);
    }
    barrier.wait();
    let touched = (0..=load.passes as u64).try_for_each(|pass| {
        numbers
            .iter()
            .try_for_each(|&page| memory.touch(page, pass))
    });
    barrier.wait();
    let begin = Instant::now();
    memory.free();
    let free = begin.elapsed();
    barrier.wait();
    touched?;
    Ok((memory.moved, free))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        baselines::tree::{LookUp, TreeSpace},
        table::designs::{MemoryDevice, Ours, some_page},
    };
    use std::sync::Arc;

    #[test]
    fn every_page_is_read_back_as_written() {
        const PAGES: usize = 2000;
        let device = || Arc::new(MemoryDevice::new(16 * PAGES).unwrap());
        let designs: [Box<dyn SwapDesign>; 3] = [
            Box::new(TreeSpace::new(LookUp::Locked, 8 * PAGES, 2, device()).unwrap()),
            Box::new(TreeSpace::new(LookUp::LockFree, 8 * PAGES, 2, device()).unwrap()),
            Box::new(Ours::with_tier(8 * PAGES, 2, &device()).unwrap()),
        ];
        for design in designs {
            for order in [Order::Ascending, Order::Random] {
                let load = Load {
                    pages: PAGES,
                    passes: 3,
                    order,
                    contents: &[some_page()],
                };
                let outcome = measure(&*design, 2, load).unwrap();
                assert!(outcome.moved_per_microsecond > 0.0);
            }
        }
    }
}
