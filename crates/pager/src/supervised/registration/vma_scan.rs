//! Scanning a program's VMAs for ranges to manage, and for pages that must stay resident.
//!
//! At thread exit the kernel clears the TID word and reads the robust list without waiting for a
//! userfaultfd. If their page were swapped out, the word would not be cleared, and a thread that joins
//! would wait forever. The C library keeps both in the last page of the thread's stack. Stacks are
//! recognised by the guard at their other end: a `PROT_NONE` mapping, or a guard region
//! (`MADV_GUARD_INSTALL`, glibc 2.42 and later) inside the VMA. Adjacent stacks of the second kind form
//! one VMA.
//!
//! Guard regions are never managed: `UFFDIO_MOVE` refuses them, and `UFFDIO_COPY` would replace them.
//!
//! The kernel never merges a VMA that was registered after its first touch with its neighbour, because
//! their `anon_vma`s differ. If new memory were registered at once, a heap that grows in small steps
//! would be split into as many VMAs, up to `vm.max_map_count`. So memory that grew next to a managed
//! range stays unmanaged until it is a considerable part of that range or of the limit.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::kernel::Process;
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::proc_text;
use std::io;
use std::sync::atomic::Ordering;

/// Smallest mapping to manage, in pages. A smaller value saves little memory and splits more VMAs.
/// The simulation has few pages.
const SMALLEST_MAPPING_PAGES: u64 = if cfg!(simulated) { 1 } else { 16 };
/// Divisor of the adjacent managed range: memory that grew stays unmanaged below this part. A larger
/// divisor manages memory earlier and creates more VMAs.
const PART_OF_RANGE: u64 = 16;
/// Divisor of a program's share of the limit: at most this part stays unmanaged, and so unreclaimable.
const PART_OF_LIMIT: u64 = 8;
/// Number of mappings below which `vm.max_map_count` is not read. It is well below any usual value of
/// the sysctl.
const FEW_MAPPINGS: usize = 1 << 12;

/// Result of one scan of a program's VMAs. The governor owns it.
#[derive(Debug, Default)]
pub(crate) struct VmaScan {
    /// Mappings to manage, of which some part is not managed yet.
    pub unmanaged: Vec<PageRange>,
    /// Guard regions in them, which are never managed.
    pub guards: RangeSet,
    /// The last pages of thread stacks, in order.
    pub thread_ends: Vec<VirtualPage>,
    /// Mappings of `unmanaged` that grew next to a managed range and are a small part of it.
    tails: Vec<PageRange>,
}

impl AddressSpace {
    /// There are more mappings, or longer names of mapped files, than are read: they are scanned no more.
    pub(crate) fn note_unreadable(&self) {
        if !self.sampling.is_unreadable.swap(true, Ordering::Relaxed) {
            let pid = self.inspector().map_or(0, |inspector| inspector.pid());
            log::warn!(
                "process {pid} has more mappings, or longer paths of mapped files, than memfold reads: memory that it maps \
                 from now on cannot be paged out, and may exceed the limit; map less, or files with shorter paths"
            );
        }
    }
}

impl VmaScan {
    /// Scans the VMAs of a program.
    pub(crate) fn of(space: &AddressSpace, attached: &Attached) -> io::Result<VmaScan> {
        let areas = attached.inspector.vmas()?;
        #[cfg(not(simulated))]
        if space.fork.forked.load(Ordering::Relaxed) {
            space.fork.sharing.note_mappings(&areas);
        }
        let mut scan = VmaScan::default();
        lock(&space.refused).age();
        for (index, area) in areas.iter().enumerate() {
            let range = PageRange::of_addresses(area.start, area.end);
            let arena = &attached.arena;
            if !area.is_movable()
                || range.pages() < SMALLEST_MAPPING_PAGES
                || !range.intersection(arena.whole).is_empty()
                || range.contains(arena.beacon)
                || lock(&space.refused).covers(range)
            {
                continue;
            }
            let parts = lock(&space.managed).uncovered(range);
            let mut guards = Vec::new();
            for part in &parts {
                let found = attached.inspector.guard_regions(*part)?;
                guards.extend(found);
            }
            if parts == [range] && is_small_tail(&lock(&space.managed), range) {
                scan.tails.push(range);
            }
            let below = index.checked_sub(1).map(|index| &areas[index]);
            scan.add(
                below.is_some_and(|below| below.guards(area)),
                range,
                &parts,
                &guards,
            );
        }
        if has_many_mappings(areas.len()) {
            scan.skip_all(space);
        } else {
            scan.skip_tails(unmanaged_at_most(space));
        }
        Ok(scan)
    }

    /// Leaves the smallest tails unmanaged, at most `at_most` pages together.
    fn skip_tails(&mut self, at_most: u64) {
        self.tails.sort_by_key(|tail| tail.pages());
        let mut left = at_most;
        for tail in std::mem::take(&mut self.tails) {
            if tail.pages() > left {
                break;
            }
            left -= tail.pages();
            self.unmanaged.retain(|range| *range != tail);
        }
    }

    /// Leaves everything unmanaged, as the program needs the VMAs that `vm.max_map_count` still allows.
    fn skip_all(&mut self, space: &AddressSpace) {
        let warned = &space.resources.warned_mappings;
        if !self.unmanaged.is_empty() && !warned.swap(true, Ordering::Relaxed) {
            let pid = space.inspector().map_or(0, |inspector| inspector.pid());
            log::warn!(
                "process {pid} has more than three quarters of the mappings that vm.max_map_count allows: \
                 memory that it maps from now on cannot be paged out, and may exceed the limit; raise \
                 vm.max_map_count (reported once)"
            );
        }
        self.unmanaged.clear();
    }

    /// Adds a mapping, of which `parts` are not managed, with the guard regions in these parts.
    /// `guarded`: a `PROT_NONE` mapping lies below.
    fn add(&mut self, guarded: bool, range: PageRange, parts: &[PageRange], guards: &[PageRange]) {
        for guard in guards {
            self.guards.add(*guard);
            if guard.start > range.start {
                self.thread_ends.push(VirtualPage(guard.start.0 - 1));
            }
        }
        if guarded || !guards.is_empty() {
            self.thread_ends.push(VirtualPage(range.end.0 - 1));
        }
        let guards = &self.guards;
        if parts.iter().any(|part| !guards.uncovered(*part).is_empty()) {
            self.unmanaged.push(range);
        }
    }
}

/// Whether an unmanaged range is small compared with an adjacent managed range.
fn is_small_tail(managed: &RangeSet, range: PageRange) -> bool {
    let before = range.start.0.checked_sub(1).map(VirtualPage);
    let adjacent = before.into_iter().chain([range.end]);
    let largest = adjacent
        .filter_map(|page| managed.containing(page))
        .max_by_key(|range| range.pages());
    largest.is_some_and(|largest| range.pages() < largest.pages() / PART_OF_RANGE)
}

/// Number of manageable pages of a program that may stay unmanaged.
fn unmanaged_at_most(space: &AddressSpace) -> u64 {
    let resources = &space.resources;
    let limit = resources.resident_limit_bytes() / PAGE_SIZE as u64;
    let own = space.resident_pages().max(0) as u64;
    let all = resources.charged_pages().max(own).max(1);
    (u128::from(limit / PART_OF_LIMIT) * u128::from(own) / u128::from(all)) as u64
}

/// Whether `count` mappings are near `vm.max_map_count`.
fn has_many_mappings(count: usize) -> bool {
    let most = || {
        proc_text("/proc/sys/vm/max_map_count")
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    count > FEW_MAPPINGS && most().is_some_and(|most: usize| count > most / 4 * 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    fn scan(guarded: bool, parts: &[PageRange], guards: &[PageRange]) -> (Vec<u64>, bool) {
        let mut scan = VmaScan::default();
        scan.add(guarded, range(100, 200), parts, guards);
        let ends = scan.thread_ends.iter().map(|page| page.0).collect();
        (ends, scan.unmanaged == [range(100, 200)])
    }

    #[test]
    fn a_mapping_without_a_guard_has_no_threads_end() {
        assert_eq!(scan(false, &[range(100, 200)], &[]), (vec![], true));
        assert_eq!(scan(false, &[], &[]), (vec![], false));
    }

    #[test]
    fn stacks_end_where_the_mapping_or_the_next_guard_is() {
        assert_eq!(scan(true, &[range(150, 200)], &[]), (vec![199], true));
        let one = range(100, 101);
        assert_eq!(scan(false, &[range(100, 200)], &[one]), (vec![199], true));
        let two = [one, range(160, 161)];
        let (ends, unmanaged) = scan(false, &[range(100, 200)], &two);
        assert_eq!((ends, unmanaged), (vec![159, 199], true));
    }

    #[test]
    fn growth_stays_unmanaged_until_it_is_a_considerable_part() {
        let mut managed = RangeSet::default();
        managed.add(range(1000, 2600));
        for (tail, small) in [
            (range(2600, 2699), true),
            (range(2600, 2700), false),
            (range(950, 1000), true),
            (range(2601, 2610), false),
        ] {
            assert_eq!(is_small_tail(&managed, tail), small, "{tail:?}");
        }
        let tails = [range(0, 30), range(100, 110), range(200, 220)];
        let left = |at_most| {
            let mut scan = VmaScan {
                unmanaged: [range(500, 900)].iter().chain(&tails).copied().collect(),
                tails: tails.to_vec(),
                ..VmaScan::default()
            };
            scan.skip_tails(at_most);
            scan.unmanaged.len() - 1
        };
        // The largest tails are managed first.
        assert_eq!([60, 59, 30, 29, 9].map(left), [0, 1, 1, 2, 3]);
    }

    #[test]
    fn few_mappings_are_not_near_the_maximum() {
        assert!(!has_many_mappings(FEW_MAPPINGS));
        assert!(has_many_mappings(usize::MAX));
    }

    #[test]
    fn guards_alone_are_not_worth_managing() {
        let guards = [range(100, 101), range(160, 161)];
        assert_eq!(scan(false, &guards, &guards), (vec![159, 199], false));
    }
}
