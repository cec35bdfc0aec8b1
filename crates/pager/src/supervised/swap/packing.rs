//! When cold pages move into blocks, where no time is given: under pressure, on idle CPUs.
//!
//! Age is counted in page-outs, as memory is needed by them and not by time: a *pass* over all slots is
//! due when as many pages went out as are in the pool. What was not loaded between two passes is cold:
//! pages that a program goes round come back before. Where pages leave blocks sooner than they should, the
//! next pass is due later.

use std::time::Duration;

use crate::cpu_waiting::CpuWaiting;
use crate::time::Instant;

/// Fewest page-outs between two passes. More spares small pools, which have little to give.
const FEWEST_PAGES: u64 = 2048;
/// The pool's part of the limit from which on blocks are worth their time.
const POOL_PART: u64 = 16;
/// Longest distance of passes, in page-outs for each page in the pool.
const MOST_PATIENCE: u64 = 8;
/// First and longest pause after a step that had to wait for a CPU. Longer takes less from others, and leaves
/// the pool large on machines that are never idle.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(640);

/// What was counted so far, and the sizes now.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// Pages that went out.
    pub out: u64,
    /// Pages that are out.
    pub stored: u64,
    /// Pages that were put into blocks.
    pub packed: u64,
    /// Pages that are in blocks.
    pub in_blocks: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
}

/// Decides about passes and steps.
#[derive(Debug)]
pub(super) struct Packing {
    /// The counts at the start of the last pass.
    before: Counts,
    /// Page-outs between passes for each page that is out.
    patience: u64,
    /// Slots of the pass that are still to be scanned.
    left: usize,
    /// No step before.
    paused_until: Option<Instant>,
    pause: Duration,
}

impl Packing {
    pub(super) fn new() -> Packing {
        Packing {
            before: Counts::default(),
            patience: 1,
            left: 0,
            paused_until: None,
            pause: FIRST_PAUSE,
        }
    }

    /// Begins a pass over so many slots if one is due under this limit. Returns whether there is anything to
    /// do.
    pub(super) fn has_work(&mut self, now: Counts, limit: u64, slots: usize) -> bool {
        if self.left > 0 {
            return true;
        }
        let distance = (now.stored * self.patience).max(FEWEST_PAGES);
        if now.pool_bytes < limit / POOL_PART || now.out < self.before.out + distance {
            return false;
        }
        let packed = now.packed - self.before.packed;
        let left_blocks = (self.before.in_blocks + packed).saturating_sub(now.in_blocks);
        // Pages that come back paid for a block, and make others pay; those that died only cost idle time.
        if left_blocks * 2 > packed.max(now.in_blocks / 8) {
            self.patience = (self.patience * 2).min(MOST_PATIENCE);
        } else {
            self.patience = (self.patience / 2).max(1);
        }
        self.before = now;
        self.left = slots;
        true
    }

    /// Whether the next step may run now.
    pub(super) fn may_step(&self, now: Instant) -> bool {
        self.paused_until.is_none_or(|until| now >= until)
    }

    /// Notes a step over so many slots, at the end of which the thread had run and had waited for a CPU for
    /// these times.
    pub(super) fn note_step(&mut self, slots: usize, waiting: CpuWaiting, now: Instant) {
        self.left = self.left.saturating_sub(slots);
        if waiting.is_idle() {
            self.pause = FIRST_PAUSE;
            self.paused_until = None;
        } else {
            self.paused_until = Some(now + self.pause);
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 1 << 30;

    fn counts(out: u64, stored: u64) -> Counts {
        Counts {
            out,
            stored,
            pool_bytes: LIMIT / 4,
            ..Counts::default()
        }
    }

    fn waiting(ran: u64, waited: u64) -> CpuWaiting {
        CpuWaiting::of_times(Duration::from_millis(ran), Duration::from_millis(waited))
    }

    #[test]
    fn a_pass_is_due_when_the_pool_went_round() {
        let mut packing = Packing::new();
        assert!(!packing.has_work(counts(1000, 1000), LIMIT, 512));
        assert!(packing.has_work(counts(10_000, 10_000), LIMIT, 1024));
        packing.note_step(512, waiting(5, 0), Instant::now());
        assert!(packing.has_work(counts(10_000, 10_000), LIMIT, 1024));
        packing.note_step(512, waiting(5, 0), Instant::now());
        assert!(!packing.has_work(counts(19_999, 10_000), LIMIT, 1024));
        assert!(packing.has_work(counts(20_000, 10_000), LIMIT, 1024));
    }

    #[test]
    fn a_small_pool_is_left_alone() {
        let mut packing = Packing::new();
        let small = Counts {
            pool_bytes: LIMIT / 17,
            ..counts(1 << 20, 10_000)
        };
        assert!(!packing.has_work(small, LIMIT, 512));
    }

    #[test]
    fn passes_are_rarer_while_pages_come_back_from_blocks() {
        let mut packing = Packing::new();
        let mut now = counts(0, 10_000);
        let mut distance = |packed: u64, in_blocks: u64| {
            now.packed += packed;
            now.in_blocks = in_blocks;
            let start = now.out;
            while !packing.has_work(now, LIMIT, 1) {
                now.out += 1000;
            }
            packing.note_step(1, waiting(1, 0), Instant::now());
            now.out - start
        };
        assert_eq!(distance(0, 0), 10_000);
        assert_eq!(distance(4000, 4000), 10_000);
        // All of them came back.
        assert_eq!(distance(0, 0), 10_000);
        assert_eq!(distance(4000, 1000), 20_000);
        for _ in 0..4 {
            distance(4000, 1000);
        }
        assert_eq!(distance(4000, 5000), 80_000);
        assert_eq!(distance(4000, 9000), 40_000);
    }

    #[test]
    fn steps_wait_while_others_want_the_cpu() {
        let mut packing = Packing::new();
        assert!(packing.has_work(counts(10_000, 1000), LIMIT, 1 << 20));
        let start = Instant::now();
        packing.note_step(512, waiting(5, 1), start);
        assert!(packing.may_step(start));
        for pause in [20, 40, 80, 160, 320, 640, 640] {
            packing.note_step(512, waiting(5, 2), start);
            let pause = Duration::from_millis(pause);
            assert!(!packing.may_step(start + pause * 9 / 10));
            assert!(packing.may_step(start + pause));
        }
        packing.note_step(512, waiting(5, 0), start);
        assert!(packing.may_step(start));
    }
}
