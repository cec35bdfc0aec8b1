//! LIRS: pages with a short distance between their last two uses stay.

use super::{
    queue::{Page, Queue},
    replay::Policy,
};

/// Jiang and Zhang's LIRS.
#[derive(Debug)]
pub struct Lirs {
    room: usize,
    /// Pages with short distances, at most.
    low_room: usize,
    /// Pages with short distances: all in memory, and in `stack`.
    is_low: Vec<bool>,
    low: usize,
    /// By recency, the oldest first, down to the oldest page with a short distance.
    stack: Queue,
    /// Pages with long distances that are in memory, the next victim first.
    resident_high: Queue,
    /// Pages of `stack` that are not in memory, the one evicted first first.
    evicted: Queue,
}

impl Lirs {
    /// Evicted pages that are remembered, as a multiple of the memory.
    const REMEMBERED: usize = 2;

    /// Memory of `room` of `pages` pages. One in a hundred is for pages with long distances.
    pub fn new(pages: usize, room: usize) -> Self {
        let queue = || Queue::new(pages);
        Self {
            room,
            low_room: room - (room / 100).max(2).min(room),
            is_low: vec![false; pages],
            low: 0,
            stack: queue(),
            resident_high: queue(),
            evicted: queue(),
        }
    }

    /// The oldest page of the stack always has a short distance.
    fn prune(&mut self) {
        while let Some(oldest) = self.stack.front()
            && !self.is_low[oldest as usize]
        {
            self.stack.pop_front();
            self.evicted.remove(oldest);
        }
    }

    /// The page gets a short distance; the oldest that has one loses it if they are too many.
    fn promote(&mut self, page: Page) {
        self.stack.move_to_back(page);
        self.is_low[page as usize] = true;
        self.low += 1;
        if self.low > self.low_room
            && let Some(oldest) = self.stack.pop_front()
        {
            self.is_low[oldest as usize] = false;
            self.low -= 1;
            self.resident_high.push_back(oldest);
        }
        self.prune();
    }

    fn evict(&mut self) {
        let Some(victim) = self.resident_high.pop_front() else {
            return;
        };
        if self.stack.contains(victim) {
            self.evicted.push_back(victim);
            if self.evicted.len() > Self::REMEMBERED * self.room
                && let Some(oldest) = self.evicted.pop_front()
            {
                self.stack.remove(oldest);
            }
        }
    }
}

impl Policy for Lirs {
    fn is_resident(&self, page: Page) -> bool {
        self.is_low[page as usize] || self.resident_high.contains(page)
    }

    fn hit(&mut self, page: Page) {
        if self.is_low[page as usize] {
            self.stack.move_to_back(page);
            self.prune();
        } else if self.stack.contains(page) {
            self.resident_high.remove(page);
            self.promote(page);
        } else {
            self.stack.push_back(page);
            self.resident_high.move_to_back(page);
            // Memory of two pages has none with a short distance.
            self.prune();
        }
    }

    fn fault(&mut self, page: Page) {
        if self.resident() == self.room {
            self.evict();
        }
        if self.evicted.remove(page) || self.low < self.low_room {
            self.promote(page);
        } else {
            self.stack.move_to_back(page);
            self.resident_high.push_back(page);
            self.prune();
        }
    }

    fn resident(&self) -> usize {
        self.low + self.resident_high.len()
    }
}
