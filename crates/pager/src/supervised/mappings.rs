//! What each mapping of a program has in memory and outside, for `memfold top`.

use crate::page::{PageRange, bytes};
use crate::page_state::PageState;
use crate::supervised::kernel::Process as _;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside as _;
use std::io;
use std::time::Duration;

/// Mappings that are reported, those with the most pages. More make longer answers.
const REPORTED: usize = 64;
/// Mappings that are looked at, the largest. More take longer.
const LOOKED_AT: usize = 512;
/// Pages of which the states are read per entry to the gate. More delay faults for longer.
const AT_ONCE: u64 = 1 << 15;
/// Of so many pages that are out, the stored size of one is read. More is faster and less exact.
const SIZED: u64 = 8;
/// Longest wait for the gate. A larger one makes answers later where a program changes its mappings.
const PATIENCE: Duration = Duration::from_millis(100);

/// One mapping of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MappingUsage {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Bytes in memory, staged pages included.
    pub resident_bytes: u64,
    /// Bytes of the pages that are out.
    pub out_bytes: u64,
    /// Bytes that these take in the pool, the swap file and on other machines, estimated from a sample.
    pub stored_bytes: u64,
}

/// Pages of a mapping.
#[derive(Default)]
struct Count {
    staged: u64,
    out: u64,
    sized: u64,
    stored_bytes: u64,
}

impl Count {
    /// What all that is out takes, if the rest takes as much each as those of which the size is known.
    fn estimate(&self) -> u64 {
        let all = u128::from(self.stored_bytes) * u128::from(self.out);
        u64::try_from(all / u128::from(self.sized.max(1))).unwrap_or(u64::MAX)
    }
}

impl AddressSpace {
    /// The mappings that memfold may page out, those with the most pages first. Parts that differ in name
    /// or registration alone are one.
    ///
    /// # Errors
    /// If the program is gone, or changes its mappings all the time.
    pub(crate) fn mapping_usage(&self) -> io::Result<Vec<MappingUsage>> {
        let inspector = self.inspector().ok_or(io::ErrorKind::NotFound)?;
        let areas = inspector.vmas()?;
        let movable = areas.iter().filter(|area| area.is_movable());
        let mut ranges = joined(movable.map(|area| PageRange::of_addresses(area.start, area.end)));
        if let Some(attached) = self.attached() {
            let arena = attached.arena.whole;
            ranges.retain(|range| range.intersection(arena).is_empty());
        }
        ranges.sort_by_key(|range| std::cmp::Reverse(range.pages()));
        ranges.truncate(LOOKED_AT);
        let mut found = Vec::with_capacity(ranges.len());
        for range in ranges {
            let present = self.present(range)?.pages();
            let count = self.count(range)?;
            found.push(MappingUsage {
                start: range.start.address(),
                end: range.end.address(),
                resident_bytes: bytes(present + count.staged),
                out_bytes: bytes(count.out),
                stored_bytes: count.estimate(),
            });
        }
        found.sort_by_key(|one| std::cmp::Reverse(one.resident_bytes + one.out_bytes));
        found.truncate(REPORTED);
        Ok(found)
    }

    fn count(&self, range: PageRange) -> io::Result<Count> {
        let mut count = Count::default();
        let mut from = range.start;
        while from < range.end {
            let end = from.plus(AT_ONCE).min(range.end);
            let part = PageRange { start: from, end };
            let gate = self.shared_within(PATIENCE);
            let gate = gate.map_err(|_| io::ErrorKind::TimedOut)?;
            gate.table().visit(part, |_, entry| {
                match entry.load() {
                    PageState::Moving(_) | PageState::Staged(_) | PageState::Returning(_) => {
                        count.staged += 1;
                    }
                    PageState::Swapped(slot, _) | PageState::Filling(slot, _) => {
                        if count.out % SIZED == 0 {
                            count.sized += 1;
                            let stored = self.resources.swap.stored_bytes(slot);
                            count.stored_bytes += stored.unwrap_or(0);
                        }
                        count.out += 1;
                    }
                    PageState::Hole
                    | PageState::Resident { .. }
                    | PageState::Removed(_)
                    | PageState::Clearing => {}
                }
                true
            });
            from = end;
        }
        Ok(count)
    }
}

/// Ranges in order of their addresses; neighbours become one.
fn joined(ranges: impl Iterator<Item = PageRange>) -> Vec<PageRange> {
    let mut joined: Vec<PageRange> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn what_registration_split_is_one_mapping_again() {
        let parts = [range(1, 4), range(4, 9), range(10, 12)];
        assert_eq!(joined(parts.into_iter()), [range(1, 9), range(10, 12)]);
    }

    #[test]
    fn the_size_of_what_is_out_is_estimated_from_a_sample() {
        let out = 1 << 30;
        let count = Count {
            staged: 0,
            out,
            sized: out / SIZED,
            stored_bytes: out / SIZED * 4096,
        };
        assert_eq!(count.estimate(), out * 4096);
        assert_eq!(Count::default().estimate(), 0);
    }
}
