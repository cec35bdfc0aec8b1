//! Insertions, look-ups and deletions, with no device behind the slots.

use std::{
    sync::{Barrier, Mutex, PoisonError},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use memfold_swap::{Location, Page, Scratch, Slot, SlotRanges};

use super::designs::{Nowhere, some_page};
use crate::{baselines::SwapDesign, random::Random};

/// The operations, in the order measured.
pub const OPERATIONS: [&str; 4] = ["insert", "look-up", "look-up-in-order", "delete"];

/// Pages per store, as a reclaim batch.
const STORED_TOGETHER: usize = 64;
/// Slots per release: the PTEs of one page table, as munmap visits them.
const FREED_TOGETHER: usize = 512;

/// Start and end of each operation in one thread.
type Times = [(Instant, Instant); OPERATIONS.len()];

/// Runs all operations on `slots` slots, divided among the threads. Returns the rate of each, in
/// millions per second over all threads.
pub fn measure<D: SwapDesign>(
    design: &D,
    threads: usize,
    slots: usize,
) -> Result<[f64; OPERATIONS.len()]> {
    let part = slots / threads;
    let all = Mutex::new(Vec::with_capacity(part * threads));
    let barrier = Barrier::new(threads);
    let times = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (all, barrier) = (&all, &barrier);
                scope.spawn(move || work(design, thread, part, all, barrier))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().ok().context("a thread panicked")?)
            .collect::<Result<Vec<Times>>>()
    })?;
    ensure!(
        design.used() == 0,
        "{} slots are still in use",
        design.used()
    );
    let rate = |operation: usize| {
        let begin = times.iter().map(|times| times[operation].0).min();
        let end = times.iter().map(|times| times[operation].1).max();
        let seconds = (end? - begin?).as_secs_f64();
        Some((part * threads) as f64 / seconds / 1e6)
    };
    let mut rates = [0.0; OPERATIONS.len()];
    for (operation, found) in rates.iter_mut().enumerate() {
        *found = rate(operation).context("no thread was started")?;
    }
    Ok(rates)
}

fn work<D: SwapDesign>(
    design: &D,
    thread: usize,
    part: usize,
    all: &Mutex<Vec<Slot>>,
    barrier: &Barrier,
) -> Result<Times> {
    let page = some_page();
    let pages: [&Page; STORED_TOGETHER] = [&page; STORED_TOGETHER];
    let mut scratch = Scratch::new();
    let mut own = Vec::with_capacity(part + STORED_TOGETHER);
    // Errors are returned after the last barrier: every thread must reach all of them.
    let timed = |work: &mut dyn FnMut() -> Result<()>| {
        barrier.wait();
        let begin = Instant::now();
        let done = work();
        let end = Instant::now();
        barrier.wait();
        (done, (begin, end))
    };
    let (inserted, insert) = timed(&mut || {
        while own.len() < part {
            let count = STORED_TOGETHER.min(part - own.len());
            design.store(thread, &pages[..count], &mut scratch, &mut own)?;
        }
        Ok(())
    });
    all.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .extend_from_slice(&own);
    barrier.wait();
    // Each thread looks up as many slots as it inserted, chosen among those of all threads.
    let all_slots = all.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut random = Random::new(thread as u64 + 1);
    let scattered: Vec<Slot> = (0..part)
        .map(|_| all_slots[random.below(all_slots.len())])
        .collect();
    let expected = sum_of_locations(&scattered);
    let mut found = 0;
    let (_, look_up) = timed(&mut || {
        found = look_up_all(design, &scattered);
        Ok(())
    });
    let others = all_slots.iter().cycle().skip(all_slots.len() / 2);
    let in_order: Vec<Slot> = others.take(part).copied().collect();
    let expected_in_order = sum_of_locations(&in_order);
    let mut found_in_order = 0;
    let (_, look_up_in_order) = timed(&mut || {
        found_in_order = look_up_all(design, &in_order);
        Ok(())
    });
    let (_, delete) = timed(&mut || {
        for slots in own.chunks(FREED_TOGETHER) {
            let ranges: SlotRanges = slots.iter().copied().collect();
            design.release(thread, ranges.as_slice());
        }
        Ok(())
    });
    inserted?;
    ensure!(
        (found, found_in_order) == (expected, expected_in_order),
        "look-ups returned wrong locations"
    );
    Ok([insert, look_up, look_up_in_order, delete])
}

/// Looks slots up and sums their locations; a missing one counts as `u64::MAX`.
#[inline(never)]
fn look_up_all<D: SwapDesign>(design: &D, slots: &[Slot]) -> u64 {
    slots.iter().fold(0, |sum, &slot| {
        sum.wrapping_add(design.look_up(slot).map_or(u64::MAX, Location::into_raw))
    })
}

fn sum_of_locations(slots: &[Slot]) -> u64 {
    slots.iter().fold(0, |sum, &slot| {
        sum.wrapping_add(Nowhere::location(slot).into_raw())
    })
}
