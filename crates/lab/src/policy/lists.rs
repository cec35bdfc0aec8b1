//! memfold's victims: the two lists and the clock hand, or the hand alone.

use super::{queue::Page, replay::Policy};
use memfold_pager::replay::ReplayedMemory;

impl Policy for ReplayedMemory {
    fn is_resident(&self, page: Page) -> bool {
        ReplayedMemory::is_resident(self, page as usize)
    }

    fn hit(&mut self, page: Page) {
        self.access(page as usize);
    }

    fn fault(&mut self, page: Page) {
        ReplayedMemory::fault(self, page as usize);
    }

    fn resident(&self) -> usize {
        ReplayedMemory::resident(self)
    }
}
