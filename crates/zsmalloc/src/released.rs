//! Zspages on their way out of service.

use crate::{arena::Arenas, geometry::PageNumber, zspage::Link};

/// Zspages that were taken out of service and will be released, linked through their records.
#[derive(Debug)]
pub(crate) struct Released(Link);

impl Released {
    pub(crate) fn new() -> Self {
        Self(Link::NONE)
    }

    pub(crate) fn push(&mut self, arenas: &Arenas, page: PageNumber) {
        arenas.push(&mut self.0, page);
    }

    pub(crate) fn pop(&mut self, arenas: &Arenas) -> Option<PageNumber> {
        arenas.pop(&mut self.0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == Link::NONE
    }
}
