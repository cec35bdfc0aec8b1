//! What a replacement policy is, and the replay of a trace on one.

use super::queue::Page;

/// A policy with its memory of a fixed number of pages.
pub trait Policy {
    /// Whether the page is in memory.
    fn is_resident(&self, page: Page) -> bool;
    /// An access to a page in memory.
    fn hit(&mut self, page: Page);
    /// An access to a page that is not: brings it in, and evicts.
    fn fault(&mut self, page: Page);
    /// Pages in memory.
    fn resident(&self) -> usize;
}

/// A policy that sees faults only, as `hit` does nothing.
#[derive(Debug)]
pub struct Blind<P>(pub P);

impl<P: Policy> Policy for Blind<P> {
    fn is_resident(&self, page: Page) -> bool {
        self.0.is_resident(page)
    }

    fn hit(&mut self, _page: Page) {}

    fn fault(&mut self, page: Page) {
        self.0.fault(page);
    }

    fn resident(&self) -> usize {
        self.0.resident()
    }
}

/// Faults of the accesses, first touches included.
pub fn faults(policy: &mut dyn Policy, accesses: &[Page]) -> usize {
    let mut faults = 0;
    for &page in accesses {
        if policy.is_resident(page) {
            policy.hit(page);
        } else {
            policy.fault(page);
            faults += 1;
        }
    }
    faults
}
