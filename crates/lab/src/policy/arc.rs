//! ARC: pages used once and pages used again, whose shares follow hits among those evicted lately.

use super::{
    queue::{Page, Queue},
    replay::Policy,
};

/// Megiddo and Modha's ARC.
#[derive(Debug)]
pub struct Arc {
    room: usize,
    /// The size that `once` is to have.
    target: f64,
    /// In memory, used once lately.
    once: Queue,
    /// In memory, used again.
    again: Queue,
    /// Evicted from `once`.
    once_evicted: Queue,
    /// Evicted from `again`.
    again_evicted: Queue,
}

impl Arc {
    /// Memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        let queue = || Queue::new(pages);
        Self {
            room,
            target: 0.0,
            once: queue(),
            again: queue(),
            once_evicted: queue(),
            again_evicted: queue(),
        }
    }

    /// Evicts a page from the list that is larger than it is to be.
    fn replace(&mut self, page: Page) {
        let once = self.once.len() as f64;
        let is_above = once > self.target;
        let is_at = once == self.target && self.again_evicted.contains(page);
        if self.once.len() > 0 && (is_above || is_at || self.again.len() == 0) {
            if let Some(victim) = self.once.pop_front() {
                self.once_evicted.push_back(victim);
            }
        } else if let Some(victim) = self.again.pop_front() {
            self.again_evicted.push_back(victim);
        }
    }
}

impl Policy for Arc {
    fn is_resident(&self, page: Page) -> bool {
        self.once.contains(page) || self.again.contains(page)
    }

    fn hit(&mut self, page: Page) {
        self.once.remove(page);
        self.again.move_to_back(page);
    }

    fn fault(&mut self, page: Page) {
        let ratio = |one: &Queue, other: &Queue| (one.len() as f64 / other.len() as f64).max(1.0);
        if self.once_evicted.contains(page) {
            let more = ratio(&self.again_evicted, &self.once_evicted);
            self.target = (self.target + more).min(self.room as f64);
            self.replace(page);
            self.once_evicted.remove(page);
            self.again.push_back(page);
            return;
        }
        if self.again_evicted.contains(page) {
            let less = ratio(&self.once_evicted, &self.again_evicted);
            self.target = (self.target - less).max(0.0);
            self.replace(page);
            self.again_evicted.remove(page);
            self.again.push_back(page);
            return;
        }
        let first = self.once.len() + self.once_evicted.len();
        let all = first + self.again.len() + self.again_evicted.len();
        if first == self.room {
            if self.once.len() < self.room {
                self.once_evicted.pop_front();
                self.replace(page);
            } else {
                self.once.pop_front();
            }
        } else if all >= self.room {
            if all == 2 * self.room {
                self.again_evicted.pop_front();
            }
            self.replace(page);
        }
        self.once.push_back(page);
    }

    fn resident(&self) -> usize {
        self.once.len() + self.again.len()
    }
}
