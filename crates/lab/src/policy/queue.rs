//! Queues of pages from which any page can be taken.

/// A page of a trace: the rank of its address among all pages of the trace.
pub type Page = u32;

/// Marks an end of a queue.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Links {
    before: u32,
    behind: u32,
    is_member: bool,
}

/// A doubly linked list of pages, each at most once.
#[derive(Debug)]
pub struct Queue {
    links: Vec<Links>,
    front: u32,
    back: u32,
    len: usize,
}

impl Queue {
    /// An empty queue for the pages below `pages`.
    pub fn new(pages: usize) -> Self {
        let links = Links {
            before: NONE,
            behind: NONE,
            is_member: false,
        };
        Self {
            links: vec![links; pages],
            front: NONE,
            back: NONE,
            len: 0,
        }
    }

    /// Number of pages in the queue.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the page is in the queue.
    pub fn contains(&self, page: Page) -> bool {
        self.links[page as usize].is_member
    }

    /// The page at the front.
    pub fn front(&self) -> Option<Page> {
        (self.front != NONE).then_some(self.front)
    }

    /// Adds a page, which is not in the queue, at the back.
    pub fn push_back(&mut self, page: Page) {
        assert!(!self.contains(page), "page {page} is in the queue");
        self.links[page as usize] = Links {
            before: self.back,
            behind: NONE,
            is_member: true,
        };
        match self.back {
            NONE => self.front = page,
            back => self.links[back as usize].behind = page,
        }
        self.back = page;
        self.len += 1;
    }

    /// Adds a page, which is not in the queue, at the front.
    pub fn push_front(&mut self, page: Page) {
        assert!(!self.contains(page), "page {page} is in the queue");
        self.links[page as usize] = Links {
            before: NONE,
            behind: self.front,
            is_member: true,
        };
        match self.front {
            NONE => self.back = page,
            front => self.links[front as usize].before = page,
        }
        self.front = page;
        self.len += 1;
    }

    /// Takes a page out; false if it was not in the queue.
    pub fn remove(&mut self, page: Page) -> bool {
        let links = self.links[page as usize];
        if !links.is_member {
            return false;
        }
        match links.before {
            NONE => self.front = links.behind,
            before => self.links[before as usize].behind = links.behind,
        }
        match links.behind {
            NONE => self.back = links.before,
            behind => self.links[behind as usize].before = links.before,
        }
        self.links[page as usize].is_member = false;
        self.len -= 1;
        true
    }

    /// Takes the page at the front.
    pub fn pop_front(&mut self) -> Option<Page> {
        let page = self.front()?;
        self.remove(page);
        Some(page)
    }

    /// Moves a page to the back, wherever it is.
    pub fn move_to_back(&mut self, page: Page) {
        self.remove(page);
        self.push_back(page);
    }
}
