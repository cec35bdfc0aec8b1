//! What a gather has to do, and who does it: the part of it that is under its lock.

use std::collections::VecDeque;

use crate::slot::{SlotRange, SlotRanges};

/// Ranges that wait, and the workers there are.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    ranges: VecDeque<SlotRange>,
    waiting: u64,
    /// Slots that somebody is releasing now.
    in_hand: u64,
    workers: usize,
    /// Nobody will bring more.
    closed: bool,
}

impl Backlog {
    /// Slots that wait or are being released.
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

    /// Makes room for more ranges; `false` if there is no memory.
    pub(crate) fn make_room(&mut self, ranges: usize) -> bool {
        self.ranges.try_reserve(ranges).is_ok()
    }

    /// There is one worker more, who will look before he leaves.
    pub(crate) fn worker_came(&mut self) {
        self.workers += 1;
    }

    /// A worker who finds nothing leaves: whoever brings more takes the lock after this, and finds
    /// him gone. `false` if there is something.
    pub(crate) fn worker_leaves(&mut self) -> bool {
        if self.is_waiting() {
            return false;
        }
        self.workers -= 1;
        true
    }

    /// Adds slots. There must be a worker, or the caller releases them himself.
    pub(crate) fn add(&mut self, slots: &SlotRanges) {
        self.waiting += slots.slots();
        self.ranges.extend(slots.as_slice());
    }

    /// Takes up to `most` slots, which [`finish`](Self::finish) is to be told of.
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
        let count = u64::from(count);
        self.waiting -= count;
        self.in_hand += count;
        (taken, count)
    }

    /// Slots that were taken are released. `true` if nothing is left.
    pub(crate) fn finish(&mut self, count: u64) -> bool {
        self.in_hand -= count;
        self.slots() == 0
    }
}
