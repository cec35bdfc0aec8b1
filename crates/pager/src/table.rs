//! The page states of one address space: a radix tree as the hardware's, nodes made on demand.

use crate::page::{PageRange, VirtualPage};
use crate::state::{Entry, PageState};
use memfold_swap::Slot;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const BITS: u32 = 9;
const FANOUT: usize = 1 << BITS;

struct Node<T>([OnceLock<Box<T>>; FANOUT]);

impl<T> Default for Node<T> {
    fn default() -> Self {
        Node([const { OnceLock::new() }; FANOUT])
    }
}

struct Leaf([Entry; FANOUT]);

impl Default for Leaf {
    fn default() -> Self {
        Leaf([const { Entry::new() }; FANOUT])
    }
}

type Middle = Node<Leaf>;
type Upper = Node<Middle>;

/// Pages from 0 to 2^36: all that a program on x86-64 can map below 256 TiB.
#[derive(Default)]
pub struct PageTable {
    root: Node<Upper>,
    bytes: AtomicU64,
}

fn index(page: VirtualPage, level: u32) -> usize {
    (page.0 >> (BITS * level)) as usize & (FANOUT - 1)
}

impl PageTable {
    /// The entry of a page, made if need be.
    pub fn entry(&self, page: VirtualPage) -> &Entry {
        let upper = self.child(&self.root.0[index(page, 3)]);
        let middle = self.child(&upper.0[index(page, 2)]);
        let leaf = self.child(&middle.0[index(page, 1)]);
        &leaf.0[index(page, 0)]
    }

    fn child<'a, T: Default>(&self, place: &'a OnceLock<Box<T>>) -> &'a T {
        place.get_or_init(|| {
            self.bytes
                .fetch_add(size_of::<T>() as u64, Ordering::Relaxed);
            Box::default()
        })
    }

    /// The slot of a page that is swapped out, without making its entry.
    pub fn swapped_slot(&self, page: VirtualPage) -> Option<Slot> {
        match self.leaf(page)?.0[index(page, 0)].load() {
            PageState::Swapped(slot) => Some(slot),
            _ => None,
        }
    }

    fn leaf(&self, page: VirtualPage) -> Option<&Leaf> {
        let upper = self.root.0[index(page, 3)].get()?;
        let middle = upper.0[index(page, 2)].get()?;
        middle.0[index(page, 1)].get().map(|leaf| &**leaf)
    }

    /// Visits the entries of a range, in order, skipping where there are none. Stops when
    /// `visit` returns `false`.
    pub fn visit(&self, range: PageRange, mut visit: impl FnMut(VirtualPage, &Entry) -> bool) {
        let mut page = range.start;
        while page < range.end {
            let leaf_end = VirtualPage((page.0 | (FANOUT as u64 - 1)) + 1).min(range.end);
            let Some(leaf) = self.leaf(page) else {
                page = self.skip(page);
                continue;
            };
            while page < leaf_end {
                if !visit(page, &leaf.0[index(page, 0)]) {
                    return;
                }
                page = page.plus(1);
            }
        }
    }

    /// The first page behind the largest missing node around `page`.
    fn skip(&self, page: VirtualPage) -> VirtualPage {
        let level = match self.root.0[index(page, 3)].get() {
            None => 3,
            Some(upper) if upper.0[index(page, 2)].get().is_none() => 2,
            Some(_) => 1,
        };
        VirtualPage(((page.0 >> (BITS * level)) + 1) << (BITS * level))
    }

    /// Every page there can be.
    pub fn everything() -> PageRange {
        PageRange {
            start: VirtualPage(0),
            end: VirtualPage(1 << (4 * BITS)),
        }
    }

    /// Memory that the table takes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed) + size_of::<Self>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visits_only_what_was_made() {
        let table = PageTable::default();
        let far = VirtualPage(0x7_ffff_ffff);
        table.entry(VirtualPage(5)).set(PageState::FRESH);
        table.entry(far).set(PageState::FRESH);
        let mut seen = Vec::new();
        table.visit(PageTable::everything(), |page, entry| {
            if entry.load() == PageState::FRESH {
                seen.push(page);
            }
            true
        });
        assert_eq!(seen, [VirtualPage(5), far]);
        assert!(table.leaf(VirtualPage(1 << 20)).is_none());
        assert_eq!(table.entry(VirtualPage(6)).load(), PageState::Hole);
    }

    #[test]
    fn a_visit_keeps_to_its_range_and_stops() {
        let table = PageTable::default();
        for page in 500..1030 {
            table.entry(VirtualPage(page)).set(PageState::FRESH);
        }
        let mut seen = 0;
        let range = PageRange {
            start: VirtualPage(510),
            end: VirtualPage(1026),
        };
        table.visit(range, |page, _| {
            assert!(page >= range.start && page < range.end);
            seen += 1;
            true
        });
        assert_eq!(seen, 516);
        let mut stopped = 0;
        table.visit(range, |_, _| {
            stopped += 1;
            stopped < 7
        });
        assert_eq!(stopped, 7);
    }
}
