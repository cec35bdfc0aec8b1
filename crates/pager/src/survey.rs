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

use crate::address_space::{AddressSpace, Attached};
use crate::group::lock;
use crate::page::{PageRange, VirtualPage};
use crate::regions::Regions;
use std::io;

/// Mappings smaller than this are left alone: they would not be worth their fault.
const SMALLEST_MAPPING_PAGES: u64 = 16;

/// See the module.
#[derive(Debug, Default)]
pub struct Survey {
    /// Mappings of which some is not managed yet and should be.
    pub fresh: Vec<PageRange>,
    /// What is never to be managed of them.
    pub guards: Regions,
    /// The last pages of threads' stacks, in order.
    pub thread_ends: Vec<VirtualPage>,
}

impl Survey {
    /// Looks at the mappings of a program.
    pub fn of(space: &AddressSpace, attached: &Attached) -> io::Result<Survey> {
        let areas = attached.inspector.areas()?;
        let mut survey = Survey::default();
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
            let parts = lock(&space.regions).uncovered(range);
            let mut guards = Vec::new();
            for part in &parts {
                let found = attached
                    .inspector
                    .guards(part.start.address(), part.end.address())?;
                guards.extend(found.iter().map(|&(s, e)| PageRange::of_addresses(s, e)));
            }
            let below = index.checked_sub(1).map(|index| &areas[index]);
            survey.add(
                below.is_some_and(|below| below.guards(area)),
                range,
                &parts,
                &guards,
            );
        }
        Ok(survey)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    fn survey(guarded: bool, parts: &[PageRange], guards: &[PageRange]) -> (Vec<u64>, bool) {
        let mut survey = Survey::default();
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
    fn guards_alone_are_not_worth_managing() {
        let guards = [range(100, 101), range(160, 161)];
        assert_eq!(survey(false, &guards, &guards), (vec![159, 199], false));
    }
}
