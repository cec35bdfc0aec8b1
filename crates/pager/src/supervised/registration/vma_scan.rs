//! What of a program's mappings is to be managed, and which pages must stay in memory.
//!
//! The kernel does not wait for a userfaultfd at the very end of a thread, when it writes the word
//! that says that the thread is gone, and reads the list of its robust mutexes. Were the page out,
//! the word would stay as it is, and whoever joins the thread would wait for ever. The C library
//! keeps both in the last page of the thread's stack, which is known by the guard at its other end:
//! a mapping without access, or a guard region (`MADV_GUARD_INSTALL`, glibc from 2.42 on) inside the
//! mapping of the stack. Stacks of the second kind that lie side by side are one mapping.
//!
//! Guard regions themselves are never managed: `UFFDIO_MOVE` refuses them, and `UFFDIO_COPY` would
//! put a page in their place.
//!
//! The kernel never merges a mapping that was registered after it was touched with its neighbour: each
//! has an `anon_vma` of its own. Were all registered as soon as it is seen, a heap that grows bit by
//! bit would become as many mappings, up to `vm.max_map_count`. So what grew beside a managed range is
//! left alone, to grow on as one, until it is a part of that range or of the limit that matters.

use crate::page::{PageRange, VirtualPage};
use crate::range_set::RangeSet;
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::process::proc_text;
use std::io;
use std::sync::atomic::Ordering;

/// Mappings smaller than this are left alone: they would not be worth their fault.
const SMALLEST_MAPPING_PAGES: u64 = 16;
/// What grew is left alone below this part of the range that it lies at; a smaller part means more
/// mappings.
const PART_OF_RANGE: u64 = 16;
/// All that is left alone of a program is at most this part of its share of the limit, as nothing of it
/// can be moved out.
const PART_OF_LIMIT: u64 = 8;
/// With fewer mappings than this nobody can have come near `vm.max_map_count` by being managed.
const FEW_MAPPINGS: usize = 1 << 12;

/// See the module.
#[derive(Debug, Default)]
pub struct VmaScan {
    /// Mappings of which some is not managed yet and should be.
    pub fresh: Vec<PageRange>,
    /// What is never to be managed of them.
    pub guards: RangeSet,
    /// The last pages of threads' stacks, in order.
    pub thread_ends: Vec<VirtualPage>,
    /// Those of `fresh` that grew beside a managed range and are a small part of it.
    tails: Vec<PageRange>,
}

impl VmaScan {
    /// Looks at the mappings of a program.
    pub fn of(space: &AddressSpace, attached: &Attached) -> io::Result<VmaScan> {
        let areas = attached.inspector.areas()?;
        let mut survey = VmaScan::default();
        lock(&space.refused).age();
        for (index, area) in areas.iter().enumerate() {
            let range = PageRange::of_addresses(area.start, area.end);
            let own = &attached.arena;
            if !area.movable
                || range.pages() < SMALLEST_MAPPING_PAGES
                || !range.intersection(own.whole).is_empty()
                || (range.start..range.end).contains(&own.beacon)
                || lock(&space.refused).covers(range)
            {
                continue;
            }
            let parts = lock(&space.managed).uncovered(range);
            let mut guards = Vec::new();
            for part in &parts {
                let found = attached
                    .inspector
                    .guards(part.start.address(), part.end.address())?;
                guards.extend(found.iter().map(|&(s, e)| PageRange::of_addresses(s, e)));
            }
            if parts == [range] && is_small_tail(&lock(&space.managed), range) {
                survey.tails.push(range);
            }
            let below = index.checked_sub(1).map(|index| &areas[index]);
            survey.add(
                below.is_some_and(|below| below.guards(area)),
                range,
                &parts,
                &guards,
            );
        }
        if has_many_mappings(areas.len()) {
            survey.leave_all(space);
        } else {
            survey.leave_tails(left_alone_at_most(space));
        }
        Ok(survey)
    }

    /// Leaves the smallest tails alone, of so many pages together.
    fn leave_tails(&mut self, at_most: u64) {
        self.tails.sort_by_key(|tail| tail.pages());
        let mut left = at_most;
        for tail in std::mem::take(&mut self.tails) {
            if tail.pages() > left {
                break;
            }
            left -= tail.pages();
            self.fresh.retain(|range| *range != tail);
        }
    }

    /// The program needs the mappings that it may yet have.
    fn leave_all(&mut self, space: &AddressSpace) {
        let warned = &space.resources.warned_mappings;
        if !self.fresh.is_empty() && !warned.swap(true, Ordering::Relaxed) {
            log::warn!(
                "a program has more than three quarters of the mappings that vm.max_map_count allows: \
                 what it maps from now on stays in memory, and the limit may be exceeded by that; raise \
                 vm.max_map_count (this is said once)"
            );
        }
        self.fresh.clear();
    }

    /// Adds a mapping: of which `parts` are not managed, with the guard regions in these.
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
            self.fresh.push(range);
        }
    }
}

/// Whether a range that is not managed is a small part of one beside it that is.
fn is_small_tail(managed: &RangeSet, range: PageRange) -> bool {
    let before = range.start.0.checked_sub(1).map(VirtualPage);
    let beside = before.into_iter().chain([range.end]);
    let largest = beside
        .filter_map(|page| managed.containing(page))
        .max_by_key(|range| range.pages());
    largest.is_some_and(|largest| range.pages() < largest.pages() / PART_OF_RANGE)
}

/// Pages of a program that may be left alone though they could be managed.
fn left_alone_at_most(space: &AddressSpace) -> u64 {
    let resources = &space.resources;
    let limit = resources.resident_limit_bytes() / PAGE_SIZE as u64;
    let own = space.resident_pages().max(0) as u64;
    let all = resources.charged_pages().max(own).max(1);
    (u128::from(limit / PART_OF_LIMIT) * u128::from(own) / u128::from(all)) as u64
}

/// Whether a program is near the number of mappings that it may have.
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

    fn survey(guarded: bool, parts: &[PageRange], guards: &[PageRange]) -> (Vec<u64>, bool) {
        let mut survey = VmaScan::default();
        survey.add(guarded, range(100, 200), parts, guards);
        let ends = survey.thread_ends.iter().map(|page| page.0).collect();
        (ends, survey.fresh == [range(100, 200)])
    }

    #[test]
    fn a_mapping_without_a_guard_has_no_threads_end() {
        assert_eq!(survey(false, &[range(100, 200)], &[]), (vec![], true));
        assert_eq!(survey(false, &[], &[]), (vec![], false));
    }

    #[test]
    fn stacks_end_where_the_mapping_or_the_next_guard_is() {
        assert_eq!(survey(true, &[range(150, 200)], &[]), (vec![199], true));
        let one = range(100, 101);
        assert_eq!(survey(false, &[range(100, 200)], &[one]), (vec![199], true));
        let two = [one, range(160, 161)];
        let (ends, fresh) = survey(false, &[range(100, 200)], &two);
        assert_eq!((ends, fresh), (vec![159, 199], true));
    }

    #[test]
    fn what_grew_is_left_until_it_is_a_part_that_matters() {
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
            let mut survey = VmaScan {
                fresh: [range(500, 900)].iter().chain(&tails).copied().collect(),
                tails: tails.to_vec(),
                ..VmaScan::default()
            };
            survey.leave_tails(at_most);
            survey.fresh.len() - 1
        };
        // The largest are taken first.
        assert_eq!([60, 59, 30, 29, 9].map(left), [0, 1, 1, 2, 3]);
    }

    #[test]
    fn few_mappings_are_not_near_what_a_program_may_have() {
        assert!(!has_many_mappings(FEW_MAPPINGS));
        assert!(has_many_mappings(usize::MAX));
    }

    #[test]
    fn guards_alone_are_not_worth_managing() {
        let guards = [range(100, 101), range(160, 161)];
        assert_eq!(survey(false, &guards, &guards), (vec![159, 199], false));
    }
}
