//! The state of a gather under its lock: queued ranges and workers.

use std::collections::VecDeque;

use crate::slot::{SlotRange, SlotRanges};

/// Ranges up to which an empty queue keeps its memory, which no limit counts. Fewer: it is allocated more often.
const KEPT: usize = 4096;

/// Queued ranges, and the number of workers.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    ranges: VecDeque<SlotRange>,
    waiting: u64,
    /// Slots that are being released.
    in_hand: u64,
    workers: usize,
    /// No more ranges will be added.
    closed: bool,
}

impl Backlog {
    /// Slots that are queued or being released.
    pub(crate) fn slots(&self) -> u64 {
        self.waiting + self.in_hand
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// Reserves memory for more ranges; `false` if there is none.
    pub(crate) fn make_room(&mut self, ranges: usize) -> bool {
        self.ranges.try_reserve(ranges).is_ok()
    }

    /// Counts a started worker, which checks for work before it exits.
    pub(crate) fn worker_came(&mut self) {
        self.workers += 1;
    }

    /// Counts a worker that exits; `false` if there is work again. A thread that adds work takes
    /// the lock afterwards and sees that the worker is gone.
    pub(crate) fn worker_leaves(&mut self) -> bool {
        if self.is_waiting() {
            return false;
        }
        self.workers -= 1;
        true
    }

    /// Adds slots. There must be a worker, or the caller must release them itself.
    pub(crate) fn add(&mut self, slots: &SlotRanges) {
        self.waiting += slots.slots();
        self.ranges.extend(slots.as_slice());
    }

    /// Takes up to `most` slots. [`finish`](Self::finish) must be called when they are released.
    pub(crate) fn take(&mut self, most: u32) -> (Vec<SlotRange>, u64) {
        let mut taken = Vec::new();
        let mut count = 0;
        while count < most {
            let Some(front) = self.ranges.front_mut() else {
                break;
            };
            let range = front.split_off_front(most - count);
            if front.count() == 0 {
                self.ranges.pop_front();
            }
            count += range.count();
            taken.push(range);
        }
        if self.ranges.is_empty() && self.ranges.capacity() > KEPT {
            self.ranges = VecDeque::new();
        }
        let count = u64::from(count);
        self.waiting -= count;
        self.in_hand += count;
        (taken, count)
    }

    /// Accounts for taken slots that are released. `true` if none is left.
    pub(crate) fn finish(&mut self, count: u64) -> bool {
        self.in_hand -= count;
        self.slots() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Slot;

    #[test]
    fn an_empty_queue_keeps_little_memory() {
        let mut backlog = Backlog::default();
        let mut ranges = SlotRanges::new();
        for number in 0..2 * KEPT as u32 {
            // With gaps, so that no two are one range.
            ranges.push(Slot::from_raw(1 + 2 * number));
        }
        assert!(backlog.make_room(ranges.as_slice().len()));
        backlog.add(&ranges);
        while backlog.is_waiting() {
            assert!(backlog.ranges.capacity() >= 2 * KEPT);
            let (taken, count) = backlog.take(1000);
            assert_eq!(taken.len() as u64, count);
            backlog.finish(count);
        }
        assert!(backlog.ranges.capacity() <= KEPT);
        // What is usual is not allocated anew each time.
        assert!(backlog.make_room(KEPT / 2));
        let capacity = backlog.ranges.capacity();
        backlog.take(1);
        assert_eq!(backlog.ranges.capacity(), capacity);
    }
}
