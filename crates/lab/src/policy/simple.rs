//! Policies of one queue: FIFO, CLOCK, LRU, and the adaptive insertion policies BIP and DIP.

use super::{
    queue::{Page, Queue},
    replay::Policy,
};
use crate::random::Random;

/// First in, first out.
#[derive(Debug)]
pub struct Fifo {
    queue: Queue,
    room: usize,
}

impl Fifo {
    /// Memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        let queue = Queue::new(pages);
        Self { queue, room }
    }
}

impl Policy for Fifo {
    fn is_resident(&self, page: Page) -> bool {
        self.queue.contains(page)
    }

    fn hit(&mut self, _page: Page) {}

    fn fault(&mut self, page: Page) {
        if self.queue.len() == self.room {
            self.queue.pop_front();
        }
        self.queue.push_back(page);
    }

    fn resident(&self) -> usize {
        self.queue.len()
    }
}

/// First in, first out, with a second chance for pages whose accessed bit is set.
#[derive(Debug)]
pub struct Clock {
    fifo: Fifo,
    is_accessed: Vec<bool>,
}

impl Clock {
    /// Memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        Self {
            fifo: Fifo::new(pages, room),
            is_accessed: vec![false; pages],
        }
    }
}

impl Policy for Clock {
    fn is_resident(&self, page: Page) -> bool {
        self.fifo.is_resident(page)
    }

    fn hit(&mut self, page: Page) {
        self.is_accessed[page as usize] = true;
    }

    fn fault(&mut self, page: Page) {
        if self.fifo.resident() == self.fifo.room {
            while let Some(first) = self.fifo.queue.front()
                && std::mem::take(&mut self.is_accessed[first as usize])
            {
                self.fifo.queue.move_to_back(first);
            }
        }
        self.fifo.fault(page);
    }

    fn resident(&self) -> usize {
        self.fifo.resident()
    }
}

/// Where LRU and its relatives put pages that are brought in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Insertion {
    /// Where they leave last.
    Lru,
    /// Where they leave next, but for one in [`RARELY`].
    Bimodal,
}

/// BIP's ε is 1/32, as in its paper.
const RARELY: usize = 32;

/// Least recently used.
#[derive(Debug)]
pub struct Lru {
    queue: Queue,
    room: usize,
    insertion: Insertion,
    random: Random,
}

impl Lru {
    /// Memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        Self {
            queue: Queue::new(pages),
            room,
            insertion: Insertion::Lru,
            random: Random::new(7),
        }
    }

    /// BIP: pages that are brought in leave next, but for one in 32.
    pub fn bimodal(pages: usize, room: usize) -> Self {
        Self {
            insertion: Insertion::Bimodal,
            ..Self::new(pages, room)
        }
    }

    fn access(&mut self, page: Page) -> bool {
        let is_hit = self.is_resident(page);
        if is_hit {
            self.hit(page);
        } else {
            self.fault(page);
        }
        is_hit
    }
}

impl Policy for Lru {
    fn is_resident(&self, page: Page) -> bool {
        self.queue.contains(page)
    }

    fn hit(&mut self, page: Page) {
        self.queue.move_to_back(page);
    }

    fn fault(&mut self, page: Page) {
        if self.queue.len() == self.room {
            self.queue.pop_front();
        }
        if self.insertion == Insertion::Lru || self.random.below(RARELY) == 0 {
            self.queue.push_back(page);
        } else {
            self.queue.push_front(page);
        }
    }

    fn resident(&self) -> usize {
        self.queue.len()
    }
}

/// DIP: LRU or BIP, whichever misses less on a sample of the pages. A memory has no sets that could duel
/// as those of a cache do, so each policy has a small memory of its own for the sample, without contents.
#[derive(Debug)]
pub struct Dip {
    memory: Lru,
    of_lru: Lru,
    of_bip: Lru,
    /// Above zero: LRU missed more.
    selector: i32,
}

impl Dip {
    /// One page in this many is a sample.
    const SAMPLED: usize = 16;
    /// Bound of the selector, as with the ten bits of the paper.
    const SELECTOR_MAX: i32 = 512;

    /// Memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        let of_sample = (room / Self::SAMPLED).max(1);
        Self {
            memory: Lru::new(pages, room),
            of_lru: Lru::new(pages, of_sample),
            of_bip: Lru::bimodal(pages, of_sample),
            selector: 0,
        }
    }

    fn duel(&mut self, page: Page) {
        // Spread over the pages, as neighbours are used alike.
        let hash = page.wrapping_mul(0x9e37_79b1) >> 16;
        if !(hash as usize).is_multiple_of(Self::SAMPLED) {
            return;
        }
        let change = i32::from(!self.of_lru.access(page)) - i32::from(!self.of_bip.access(page));
        self.selector = (self.selector + change).clamp(-Self::SELECTOR_MAX, Self::SELECTOR_MAX);
    }
}

impl Policy for Dip {
    fn is_resident(&self, page: Page) -> bool {
        self.memory.is_resident(page)
    }

    fn hit(&mut self, page: Page) {
        self.duel(page);
        self.memory.hit(page);
    }

    fn fault(&mut self, page: Page) {
        self.duel(page);
        self.memory.insertion = if self.selector > 0 {
            Insertion::Bimodal
        } else {
            Insertion::Lru
        };
        self.memory.fault(page);
    }

    fn resident(&self) -> usize {
        self.memory.resident()
    }
}
