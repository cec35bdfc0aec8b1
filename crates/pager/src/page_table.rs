//! The page states of one address space: a radix tree like the hardware's page table, with smaller nodes, as
//! programs spread small mappings over the whole address space (V8 asks for its chunks of 256 KiB at random
//! addresses). Nodes are allocated on demand and freed when only holes are left in them.

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{Entry, PageState};
use memfold_swap::Slot;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bits of a page number that one level resolves. More makes fewer levels and takes more memory for a small mapping that
/// lies alone: 4.5 KiB with 6, 20 KiB with 9 (if no node but the upper two is shared).
const BITS: u32 = 6;
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

/// Named after the address space that each covers.
type Mib16 = Node<Leaf>;
type Gib = Node<Mib16>;
type Gib64 = Node<Gib>;
type Tib4 = Node<Gib64>;
type Root = Node<Tib4>;
type HighRoot = Node<Node<Root>>;

/// The states of all pages that a program can map. Pages below 2^36 take six levels; pages above, which exist only with
/// five-level paging (x86-64) or addresses of 52 bits (aarch64), hang below `high`.
///
/// Any thread changes entries inside the gate; nodes are freed only while it is held exclusively.
pub(crate) struct PageTable {
    root: Root,
    high: OnceLock<Box<HighRoot>>,
    used: Arc<TableUse>,
}

/// Memory that a table takes, readable outside the gate. All accesses are Relaxed: these are counters.
#[derive(Debug)]
pub(crate) struct TableUse {
    bytes: AtomicU64,
    /// Nodes allocated since the last full sweep began.
    allocated: AtomicU64,
}

impl TableUse {
    /// Memory that the table takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether nodes were allocated since the last full sweep began.
    pub(crate) fn has_grown(&self) -> bool {
        self.allocated.load(Ordering::Relaxed) > 0
    }
}

/// Bits of a page number that four and five levels of the hardware's paging resolve.
const LOW_BITS: u32 = 36;
const ALL_BITS: u32 = 45;
const _: () = assert!(LOW_BITS == 6 * BITS && ALL_BITS <= 8 * BITS);

impl Default for PageTable {
    fn default() -> Self {
        PageTable {
            root: Root::default(),
            high: OnceLock::new(),
            used: Arc::new(TableUse {
                bytes: AtomicU64::new(size_of::<Self>() as u64),
                allocated: AtomicU64::new(0),
            }),
        }
    }
}

fn index(page: VirtualPage, level: u32) -> usize {
    (page.0 >> (BITS * level)) as usize & (FANOUT - 1)
}

/// The child of a node that covers a page, or the level of that child if it is missing.
fn child_of<T>(node: &Node<T>, page: VirtualPage, level: u32) -> Result<&T, u32> {
    let place = node.0[index(page, level)].get();
    place.map(|child| &**child).ok_or(level)
}

fn is_high(page: VirtualPage) -> bool {
    page.0 >> LOW_BITS != 0 && !Bug::HighPagesShareEntries.is_back()
}

impl PageTable {
    /// The entry of a page. Allocates missing nodes.
    pub(crate) fn entry(&self, page: VirtualPage) -> &Entry {
        &self.new_leaf(page).0[index(page, 0)]
    }

    /// The leaf of a page. Allocates missing nodes.
    fn new_leaf(&self, page: VirtualPage) -> &Leaf {
        let root = if is_high(page) {
            let high = self.child(&self.high);
            let upper = self.child(&high.0[index(page, 7)]);
            self.child(&upper.0[index(page, 6)])
        } else {
            &self.root
        };
        let tib4 = self.child(&root.0[index(page, 5)]);
        let gib64 = self.child(&tib4.0[index(page, 4)]);
        let gib = self.child(&gib64.0[index(page, 3)]);
        let mib16 = self.child(&gib.0[index(page, 2)]);
        self.child(&mib16.0[index(page, 1)])
    }

    fn child<'a, T: Default>(&self, place: &'a OnceLock<Box<T>>) -> &'a T {
        place.get_or_init(|| {
            let bytes = size_of::<T>() as u64;
            self.used.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.used.allocated.fetch_add(1, Ordering::Relaxed);
            Box::default()
        })
    }

    /// The slot of a swapped-out page. Allocates no node.
    pub(crate) fn swapped_slot(&self, page: VirtualPage) -> Option<Slot> {
        match self.leaf(page).ok()?.0[index(page, 0)].load() {
            PageState::Swapped(slot, _) => Some(slot),
            _ => None,
        }
    }

    /// The leaf of a page, or the level of the largest missing node that covers it.
    fn leaf(&self, page: VirtualPage) -> Result<&Leaf, u32> {
        let root = if is_high(page) {
            let high = self.high.get().ok_or(8_u32)?;
            child_of(child_of(high, page, 7)?, page, 6)?
        } else {
            &self.root
        };
        let gib64 = child_of(child_of(root, page, 5)?, page, 4)?;
        let mib16 = child_of(child_of(gib64, page, 3)?, page, 2)?;
        child_of(mib16, page, 1)
    }

    /// Visits the entries of a range in order and skips missing nodes. Stops when `visit` returns
    /// `false`.
    pub(crate) fn visit(
        &self,
        range: PageRange,
        mut visit: impl FnMut(VirtualPage, &Entry) -> bool,
    ) {
        self.visit_leaves(range, |part, leaf| {
            (part.start.0..part.end.0)
                .map(VirtualPage)
                .all(|page| visit(page, &leaf.0[index(page, 0)]))
        });
    }

    /// Sets each entry of `copy` to what `inherit` makes of the one here, unless that is `None`.
    pub(crate) fn copy_to(
        &self,
        copy: &PageTable,
        mut inherit: impl FnMut(&Entry) -> Option<PageState>,
    ) {
        self.visit_leaves(Self::everything(), |part, leaf| {
            let mut target = None;
            for (index, entry) in leaf.0.iter().enumerate() {
                if let Some(state) = inherit(entry) {
                    let leaf = target.get_or_insert_with(|| copy.new_leaf(part.start));
                    leaf.0[index].set(state);
                }
            }
            true
        });
    }

    fn visit_leaves(&self, range: PageRange, mut visit: impl FnMut(PageRange, &Leaf) -> bool) {
        let range = range.intersection(Self::everything());
        let mut page = range.start;
        while page < range.end {
            let leaf = match self.leaf(page) {
                Ok(leaf) => leaf,
                Err(missing) => {
                    let bits = BITS * missing;
                    page = VirtualPage(((page.0 >> bits) + 1) << bits);
                    continue;
                }
            };
            let end = VirtualPage((page.0 | (FANOUT as u64 - 1)) + 1).min(range.end);
            if !visit(PageRange { start: page, end }, leaf) {
                return;
            }
            page = end;
        }
    }

    /// The range of all possible pages.
    pub(crate) fn everything() -> PageRange {
        PageRange {
            start: VirtualPage(0),
            end: VirtualPage(1 << ALL_BITS),
        }
    }

    /// The table's memory use.
    pub(crate) fn used(&self) -> &Arc<TableUse> {
        &self.used
    }

    /// Frees the nodes that overlap a range and contain only holes. The cost is that of a visit of the
    /// range.
    pub(crate) fn prune(&mut self, range: PageRange) {
        let range = range.intersection(Self::everything());
        let low_end = 1 << LOW_BITS;
        let mut freed = 0;
        if range.start.0 < low_end && !range.is_empty() {
            let end = range.end.0.min(low_end);
            self.root.prune(range.start.0, end, &mut freed);
        }
        if let Some(high) = self.high.get_mut()
            && range.end.0 > low_end
            && high.prune(range.start.0.max(low_end), range.end.0, &mut freed)
        {
            self.high.take();
            freed += size_of::<HighRoot>() as u64;
        }
        self.used.bytes.fetch_sub(freed, Ordering::Relaxed);
    }

    /// Prunes the next `leaves` leaves from page `from` on, for pages that became holes without an
    /// event. Returns where to continue; page 0 at the end of the table.
    pub(crate) fn sweep(&mut self, from: VirtualPage, leaves: usize) -> VirtualPage {
        let all = Self::everything();
        if from == all.start {
            self.used.allocated.store(0, Ordering::Relaxed);
        }
        let (mut left, mut end) = (leaves, all.end);
        let rest = PageRange { start: from, ..all };
        self.visit_leaves(rest, |part, _| {
            if left == 0 {
                end = part.start;
            }
            left = left.saturating_sub(1);
            end == all.end
        });
        self.prune(PageRange { start: from, end });
        if end == all.end { all.start } else { end }
    }
}

trait Tree {
    /// Pages that the node covers.
    const SPAN: u64;

    /// Frees empty children in the pages `start..end`, counted from the node's first page, and adds
    /// their bytes to `freed`. Returns whether the node itself is empty.
    fn prune(&mut self, start: u64, end: u64, freed: &mut u64) -> bool;
}

impl Tree for Leaf {
    const SPAN: u64 = FANOUT as u64;

    fn prune(&mut self, _start: u64, _end: u64, _freed: &mut u64) -> bool {
        self.0.iter().all(Entry::is_hole)
    }
}

impl<T: Tree> Tree for Node<T> {
    const SPAN: u64 = T::SPAN * FANOUT as u64;

    fn prune(&mut self, start: u64, end: u64, freed: &mut u64) -> bool {
        let mut any = false;
        for index in start / T::SPAN..end.div_ceil(T::SPAN) {
            let place = &mut self.0[index as usize];
            let first = index * T::SPAN;
            if let Some(child) = place.get_mut()
                && child.prune(
                    start.saturating_sub(first),
                    (end - first).min(T::SPAN),
                    freed,
                )
            {
                place.take();
                *freed += size_of::<T>() as u64;
                any = true;
            }
        }
        // A node is allocated together with a child, so one that lost no child has one.
        any && self.0.iter().all(|place| place.get().is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replacement::Shadow;

    #[test]
    fn visits_only_allocated_nodes() {
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
        assert!(table.leaf(VirtualPage(1 << 20)).is_err());
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

    #[test]
    fn a_copy_has_what_is_inherited_and_no_node_for_the_rest() {
        let table = PageTable::default();
        let hole = VirtualPage(1 << 20);
        let far = VirtualPage(0x7_ffff_ffff);
        let high = VirtualPage(1 << 40);
        for page in [VirtualPage(5), VirtualPage(63), hole, far, high] {
            table.entry(page).set(PageState::FRESH);
        }
        let copy = PageTable::default();
        table.entry(hole).set(PageState::Hole);
        table.entry(VirtualPage(6)).set(PageState::Clearing);
        table.copy_to(&copy, |entry| match entry.load() {
            PageState::FRESH => Some(PageState::Clearing),
            _ => None,
        });
        let mut seen = Vec::new();
        copy.visit(PageTable::everything(), |page, entry| {
            if entry.load() != PageState::Hole {
                assert_eq!(entry.load(), PageState::Clearing);
                seen.push(page);
            }
            true
        });
        assert_eq!(seen, [VirtualPage(5), VirtualPage(63), far, high]);
        assert!(copy.leaf(hole).is_err());
    }

    /// Compares random changes with a `BTreeMap`. The table has exactly the nodes that the map needs,
    /// and none at the end.
    #[test]
    fn agrees_with_a_map_and_keeps_no_empty_node() {
        let mut table = PageTable::default();
        let used = table.used().clone();
        let baseline = used.bytes();
        let mut model = std::collections::BTreeMap::new();
        let mut seed = 1u64;
        let mut next = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 20) % below
        };
        let starts = [
            0,
            511,
            1 << 9,
            1 << 18,
            (1 << 27) - 3,
            1 << 36,
            (1 << 45) - 600,
        ];
        for round in 0..4000 {
            let start = starts[next(7) as usize] + next(600);
            let changed = PageRange {
                start: VirtualPage(start),
                end: VirtualPage(start + 1 + next(300)).min(PageTable::everything().end),
            };
            if next(2) == 0 {
                for page in changed.start.0..changed.end.0 {
                    let state =
                        PageState::Swapped(Slot::from_raw(next(1 << 30) as u32), Shadow::default());
                    table.entry(VirtualPage(page)).set(state);
                    model.insert(page, state);
                }
            } else {
                table.visit(changed, |_, entry| {
                    entry.set(PageState::Hole);
                    true
                });
                model.retain(|page, _| !(changed.start.0..changed.end.0).contains(page));
                table.prune(changed);
            }
            let mut found = std::collections::BTreeMap::new();
            if round % 50 == 0 {
                table.visit(PageTable::everything(), |page, entry| {
                    if entry.load() != PageState::Hole {
                        found.insert(page.0, entry.load());
                    }
                    true
                });
                assert_eq!(found, model);
            }
            assert_eq!(used.bytes(), baseline + needed(model.keys().copied()));
        }
        table.visit(PageTable::everything(), |_, entry| {
            entry.set(PageState::Hole);
            true
        });
        assert!(used.has_grown());
        let mut from = VirtualPage(0);
        let mut steps = 0;
        while from != VirtualPage(0) || steps == 0 {
            from = table.sweep(from, 8);
            steps += 1;
        }
        assert!(steps > 3 && !used.has_grown());
        assert_eq!(used.bytes(), baseline);
    }

    /// Bytes of the nodes that cover `pages`.
    fn needed(pages: impl Iterator<Item = u64>) -> u64 {
        let mut nodes = std::collections::BTreeSet::new();
        for page in pages {
            nodes.extend((1..=5).map(|level| (level, page >> (BITS * level))));
            if page >> LOW_BITS != 0 {
                nodes.extend((6..=8).map(|level| (level, page >> (BITS * level))));
            }
        }
        let size = |level: u32| match level {
            1 => size_of::<Leaf>(),
            _ => size_of::<Root>(),
        };
        nodes.iter().map(|(level, _)| size(*level) as u64).sum()
    }

    #[test]
    fn no_two_pages_share_an_entry() {
        let table = PageTable::default();
        let pages = [0, 1 << 35, 1 << 36, 1 << 44, (1 << 45) - 1].map(VirtualPage);
        for (number, page) in pages.iter().enumerate() {
            let slot = Slot::from_raw(number as u32);
            table
                .entry(*page)
                .set(PageState::Swapped(slot, Shadow::default()));
        }
        for (number, page) in pages.iter().enumerate() {
            assert_eq!(
                table.swapped_slot(*page),
                Some(Slot::from_raw(number as u32))
            );
        }
        let mut seen = Vec::new();
        table.visit(PageTable::everything(), |page, entry| {
            if entry.load() != PageState::Hole {
                seen.push(page);
            }
            true
        });
        assert_eq!(seen, pages);
    }
}
