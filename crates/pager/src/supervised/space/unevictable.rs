//! Unevictable memory: read-only and locked mappings, and all of a forked child that has no helper.
//!
//! The kernel moves pages only out of writable, unlocked mappings (`UFFDIO_MOVE` returns EINVAL for
//! others), and breaks COW only in writable ones. A garbage collector that tracks writes by `mprotect`
//! keeps most of its heap read-only. Neither `mprotect` nor `mlock` raises an event, so the mappings
//! are looked up once the kernel has refused a page. The clock hand skips them for [`INTERVAL`].
//!
//! The limit counts them (`Group::refresh_limit`): else the rest would thrash in what they leave.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::range_set::RangeSet;
use crate::supervised::kernel::Process;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_sys::process::VirtualMemoryArea;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Time for which the hand skips unevictable mappings before it tries them again. Longer costs less and
/// leaves memory that became evictable resident for longer.
const INTERVAL: Duration = Duration::from_millis(100);

/// Milliseconds after which a forked child without a helper counts as one that gets none, as it was forked past the C library or
/// under a seccomp filter. Fewer raise the limit while children start theirs.
const GETS_NONE: u64 = 1000;

/// What is known of a program's unevictable memory. The reclaimer looks for it; threads that settle a
/// batch note refusals.
#[derive(Debug, Default)]
pub(crate) struct Unevictable {
    found: Mutex<Found>,
    /// Resident pages of the program beside the evictable ones, if it has unevictable mappings.
    /// Relaxed: a hint.
    pages: AtomicU64,
}

#[derive(Debug, Default)]
struct Found {
    /// The mappings that the hand skips.
    ranges: RangeSet,
    /// Time at which they were looked for.
    since: Option<Instant>,
    /// The kernel refused to move a page or to break its COW, and the mappings were not looked up
    /// since.
    is_refused: bool,
    /// Pages that it refused to move.
    refused: Vec<VirtualPage>,
}

impl Unevictable {
    /// Notes that the kernel refused to move a page.
    pub(crate) fn note_move(&self, page: VirtualPage) {
        let mut found = lock(&self.found);
        found.is_refused = true;
        found.refused.push(page);
    }

    /// Notes that the kernel refused to break COW.
    pub(crate) fn note_cow_break(&self) {
        lock(&self.found).is_refused = true;
    }

    /// The parts of `ranges` that are evictable, as far as is known.
    pub(crate) fn evictable(&self, ranges: &[PageRange]) -> Vec<PageRange> {
        let found = lock(&self.found);
        let parts = ranges.iter().map(|range| found.ranges.uncovered(*range));
        parts.flatten().collect()
    }
}

impl Found {
    /// Forgets what is older than [`INTERVAL`]. Returns whether nothing was refused in an interval.
    fn age(&mut self) -> bool {
        let is_over = |since: Instant| since.elapsed() >= INTERVAL;
        if !self.since.is_some_and(is_over) {
            return false;
        }
        let was_empty = self.ranges.ranges().is_empty();
        self.ranges = RangeSet::default();
        self.since = (!was_empty).then(Instant::now);
        was_empty && !self.is_refused
    }
}

impl AddressSpace {
    /// Looks up the unevictable mappings if the kernel refused a page since the last look. Returns
    /// whether it did. Reads all mappings, so the caller holds no gate.
    pub(crate) fn look_for_unevictable(&self) -> bool {
        let refused = {
            let mut found = lock(&self.unevictable.found);
            if found.age() {
                self.unevictable.pages.store(0, Ordering::Relaxed);
            }
            if !std::mem::take(&mut found.is_refused) {
                return false;
            }
            std::mem::take(&mut found.refused)
        };
        let areas = self.attached().map(|attached| attached.inspector.vmas());
        let Some(Ok(areas)) = areas else {
            return false;
        };
        let managed = lock(&self.managed).clone();
        let ranges = unevictable_parts(&managed, &areas, &refused);
        let mut found = lock(&self.unevictable.found);
        found.ranges.add_all(&ranges);
        found.since.get_or_insert_with(Instant::now);
        true
    }

    /// Resident pages that are not evictable: all of a program without a helper; and if some mappings are unevictable, theirs
    /// and what is too small to be managed.
    pub(crate) fn unevictable_pages(&self) -> u64 {
        let gets_no_helper = || {
            let age = self.resources.milliseconds().saturating_sub(self.made_at);
            self.attached().is_none() && age >= GETS_NONE
        };
        if self.has_left() {
            0
        } else if gets_no_helper() {
            self.resident_pages().max(0) as u64
        } else {
            self.unevictable.pages.load(Ordering::Relaxed)
        }
    }

    /// Counts the resident pages that are not evictable, if some mappings are unevictable.
    pub(crate) fn count_unevictable(&self, gate: &Shared<'_>) {
        debug_assert!(gate.is_of(self));
        let managed = lock(&self.managed).clone();
        let ranges = self.unevictable.evictable(managed.ranges());
        let pages = if ranges == managed.ranges() {
            0
        } else {
            let staged = lock(&self.stage).live() as u64;
            let evictable = evictable_pages(gate, &ranges, u64::MAX) + staged;
            let resident = self.resident_pages().max(0) as u64;
            resident.saturating_sub(evictable)
        };
        self.unevictable.pages.store(pages, Ordering::Relaxed);
    }
}

/// Number of resident pages in evictable ranges, counted up to `enough`.
pub(crate) fn evictable_pages(gate: &Shared<'_>, ranges: &[PageRange], enough: u64) -> u64 {
    let mut pages = 0;
    for range in ranges {
        gate.table().visit(*range, |_, entry| {
            let state = entry.load();
            let is_resident = matches!(state, PageState::Resident { .. } | PageState::Moving(_));
            pages += u64::from(is_resident);
            pages < enough
        });
    }
    pages
}

/// The managed parts of mappings that are not writable, and of those around `refused` pages, which are
/// locked if they are writable.
fn unevictable_parts(
    managed: &RangeSet,
    areas: &[VirtualMemoryArea],
    refused: &[VirtualPage],
) -> RangeSet {
    let mut parts = RangeSet::default();
    for area in areas {
        let range = PageRange::of_addresses(area.start, area.end);
        let is_refused = |page: &VirtualPage| range.contains(*page);
        if !area.is_movable() || refused.iter().any(is_refused) {
            let covered = managed.covered(range);
            covered.into_iter().for_each(|part| parts.add(part));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;
    use memfold_sys::process::AreaKind;

    fn area(pages: PageRange, movable: bool) -> VirtualMemoryArea {
        VirtualMemoryArea {
            start: pages.start.address(),
            end: pages.end.address(),
            kind: if movable {
                AreaKind::Movable
            } else {
                AreaKind::Anonymous
            },
        }
    }

    #[test]
    fn read_only_and_refused_mappings_are_unevictable() {
        let mut managed = RangeSet::default();
        managed.add(range(10, 60));
        let areas = [
            area(range(0, 20), false),
            area(range(20, 30), true),
            area(range(30, 40), true),
            area(range(50, 70), false),
        ];
        let parts = unevictable_parts(&managed, &areas, &[VirtualPage(35)]);
        assert_eq!(
            parts.ranges(),
            [range(10, 20), range(30, 40), range(50, 60)]
        );
        let unevictable = Unevictable::default();
        lock(&unevictable.found).ranges = parts;
        let evictable = unevictable.evictable(&[range(10, 25), range(36, 55)]);
        assert_eq!(evictable, [range(20, 25), range(40, 50)]);
    }

    #[test]
    fn unevictable_mappings_are_tried_again() {
        let mut found = Found::default();
        assert!(!found.age());
        found.ranges.add(range(1, 2));
        found.since = Some(Instant::now());
        assert!(!found.age() && !found.ranges.ranges().is_empty());
        crate::time::sleep(INTERVAL);
        assert!(!found.age() && found.ranges.ranges().is_empty());
        crate::time::sleep(INTERVAL);
        assert!(found.age(), "nothing was refused meanwhile");
        assert!(!found.age());
    }
}
