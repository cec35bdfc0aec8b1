//! S3-FIFO: a small queue for new pages, a main one for those that were used again.

use super::{
    queue::{Page, Queue},
    replay::Policy,
};

/// S3-FIFO of Yang et al.
#[derive(Debug)]
pub struct S3Fifo {
    room: usize,
    small_room: usize,
    small: Queue,
    main: Queue,
    /// Evicted from `small`, as many as `main` may hold.
    ghost: Queue,
    /// Uses since the page was brought in, three at most.
    uses: Vec<u8>,
}

impl S3Fifo {
    /// Memory of `room` of `pages` pages, a tenth for new ones.
    pub fn new(pages: usize, room: usize) -> Self {
        let queue = || Queue::new(pages);
        Self {
            room,
            small_room: (room / 10).max(1),
            small: queue(),
            main: queue(),
            ghost: queue(),
            uses: vec![0; pages],
        }
    }

    fn evict(&mut self) {
        while self.resident() == self.room {
            if self.small.len() >= self.small_room || self.main.len() == 0 {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
    }

    fn evict_small(&mut self) {
        let Some(page) = self.small.pop_front() else {
            return;
        };
        if std::mem::take(&mut self.uses[page as usize]) > 1 {
            self.main.push_back(page);
            return;
        }
        self.ghost.push_back(page);
        if self.ghost.len() > self.room - self.small_room {
            self.ghost.pop_front();
        }
    }

    fn evict_main(&mut self) {
        while let Some(page) = self.main.pop_front() {
            let uses = &mut self.uses[page as usize];
            if *uses == 0 {
                return;
            }
            *uses -= 1;
            self.main.push_back(page);
        }
    }
}

impl Policy for S3Fifo {
    fn is_resident(&self, page: Page) -> bool {
        self.small.contains(page) || self.main.contains(page)
    }

    fn hit(&mut self, page: Page) {
        let uses = &mut self.uses[page as usize];
        *uses = (*uses + 1).min(3);
    }

    fn fault(&mut self, page: Page) {
        self.evict();
        self.uses[page as usize] = 0;
        if self.ghost.remove(page) {
            self.main.push_back(page);
        } else {
            self.small.push_back(page);
        }
    }

    fn resident(&self) -> usize {
        self.small.len() + self.main.len()
    }
}
