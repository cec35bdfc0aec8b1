//! Write protection of pages that a fork shares.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Most ranges that are remembered as writable. With more, all that is managed is protected at the next fork; a
/// larger value takes more calls of the kernel there, one a range.
const MOST_WRITABLE: usize = 48;

/// The write protection of an address space, which `fault/cow.rs` maintains. Hints: all accesses are
/// Relaxed.
#[derive(Debug, Default)]
pub(crate) struct CowProtection {
    /// The managed ranges were write-protected since the last fork, but for a few pages.
    pub write_protected: AtomicBool,
    /// The page after the last window that was unprotected, to detect sequential writers.
    pub written_to: AtomicU64,
    /// Pages of zeros are to be protected, of which the first write takes memory.
    pub protects_zeros: AtomicBool,
    /// Something was protected since all was unprotected the last time. Set after the request.
    pub any_protected: AtomicBool,
    /// What is managed and may not be protected, if that is known: it was copied in or unprotected since all was
    /// protected.
    writable: Mutex<Option<RangeSet>>,
    /// Whether that is known, so that programs that never fork take no lock.
    is_known: AtomicBool,
}

impl CowProtection {
    /// What may not be protected; `None` if that is not known.
    pub(crate) fn writable(&self) -> Option<RangeSet> {
        if !self.is_known.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.writable).clone()
    }

    /// Sets what may not be protected. Called before pages are protected: what is noted meanwhile is kept.
    pub(crate) fn set_writable(&self, writable: Option<RangeSet>) {
        self.is_known.store(writable.is_some(), Ordering::Relaxed);
        *lock(&self.writable) = writable;
    }

    /// Notes pages that were copied in or unprotected.
    pub(crate) fn note_writable(&self, range: PageRange) {
        self.change(|writable| writable.add(range));
    }

    /// Forgets what was unmapped.
    pub(crate) fn note_unmapped(&self, range: PageRange) {
        self.change(|writable| writable.remove(range));
    }

    /// Follows pages that were moved: the kernel moves their protection along.
    pub(crate) fn note_moved(&self, from: PageRange, to: VirtualPage) {
        self.change(|writable| {
            let parts = writable.covered(from);
            writable.remove(from);
            writable.remove(from.moved(from.start, to));
            for part in parts {
                writable.add(part.moved(from.start, to));
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut RangeSet)) {
        if !self.is_known.load(Ordering::Relaxed) {
            return;
        }
        let mut known = lock(&self.writable);
        let Some(writable) = known.as_mut() else {
            return;
        };
        change(writable);
        if writable.ranges().len() > MOST_WRITABLE {
            *known = None;
            self.is_known.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn writable_pages_are_known_once_all_were_protected() {
        let cow = CowProtection::default();
        cow.note_writable(range(1, 2));
        assert_eq!(cow.writable(), None);
        cow.set_writable(Some(RangeSet::default()));
        cow.note_writable(range(10, 20));
        cow.note_writable(range(30, 31));
        cow.note_unmapped(range(12, 18));
        cow.note_moved(range(11, 20), VirtualPage(111));
        let writable = cow.writable().unwrap();
        let expected = [(10, 11), (30, 31), (111, 112), (118, 120)];
        assert_eq!(
            writable.ranges(),
            expected.map(|(start, end)| range(start, end))
        );
    }

    #[test]
    fn too_many_writable_ranges_are_not_known() {
        let cow = CowProtection::default();
        cow.set_writable(Some(RangeSet::default()));
        for page in 0..MOST_WRITABLE as u64 {
            cow.note_writable(range(2 * page, 2 * page + 1));
        }
        assert!(cow.writable().is_some());
        cow.note_writable(range(1000, 1001));
        assert_eq!(cow.writable(), None);
    }
}
