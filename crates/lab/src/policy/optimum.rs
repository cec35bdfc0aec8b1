//! Belady's optimum: the page whose next use is farthest away leaves.

use super::{queue::Page, replay::Policy};
use std::collections::BinaryHeap;

/// No later use.
const NEVER: u32 = u32::MAX;

/// The optimum, which knows the accesses to come.
#[derive(Debug)]
pub struct Optimum {
    room: usize,
    /// For each access, the place of the next one to the same page.
    next_uses: Vec<u32>,
    now: usize,
    /// The next use of each page in memory.
    resident: Vec<Option<u32>>,
    /// Next uses with their pages. Entries that `resident` does not confirm are old.
    by_next_use: BinaryHeap<(u32, Page)>,
    len: usize,
}

impl Optimum {
    /// Memory of `room` of `pages` pages for these accesses.
    pub fn new(pages: usize, room: usize, accesses: &[Page]) -> Self {
        let mut next_uses = vec![NEVER; accesses.len()];
        let mut next = vec![NEVER; pages];
        for (place, page) in accesses.iter().enumerate().rev() {
            next_uses[place] = std::mem::replace(&mut next[*page as usize], place as u32);
        }
        Self {
            room,
            next_uses,
            now: 0,
            resident: vec![None; pages],
            by_next_use: BinaryHeap::new(),
            len: 0,
        }
    }
}

impl Policy for Optimum {
    fn is_resident(&self, page: Page) -> bool {
        self.resident[page as usize].is_some()
    }

    fn hit(&mut self, page: Page) {
        let next = self.next_uses[self.now];
        self.now += 1;
        self.resident[page as usize] = Some(next);
        self.by_next_use.push((next, page));
    }

    fn fault(&mut self, page: Page) {
        while self.len == self.room
            && let Some((next, victim)) = self.by_next_use.pop()
        {
            let place = &mut self.resident[victim as usize];
            if *place == Some(next) {
                *place = None;
                self.len -= 1;
            }
        }
        self.len += 1;
        self.hit(page);
    }

    fn resident(&self) -> usize {
        self.len
    }
}
