//! Mappings that the kernel refuses to register: those with a userfaultfd of the program, and kinds
//! that no userfaultfd may have (`MAP_DROPPABLE`).
//!
//! The kernel does not report when a refusal ends, so registration is retried at intervals. In between,
//! these mappings do not count as new: if only such memory is left, reclaim makes no progress, and
//! faults must not wait for it.

use crate::page::PageRange;
use crate::range_set::RangeSet;
use crate::time::Instant;
use std::time::Duration;

/// Interval at which registration is retried. Longer costs less and keeps memory unmanaged for longer.
const AGAIN: Duration = Duration::from_secs(10);

/// Refused ranges of one program. The governor uses it; guarded by a mutex of the address space.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    /// Refused in the current interval.
    current: RangeSet,
    /// Refused in the previous interval.
    previous: RangeSet,
    /// Start of the current interval, at its first refusal.
    since: Option<Instant>,
}

impl Refused {
    /// Notes a range that the kernel refused to register.
    pub(crate) fn note(&mut self, range: PageRange) {
        self.since.get_or_insert_with(Instant::now);
        self.current.add(range);
    }

    /// The ranges refused in the current interval.
    pub(crate) fn ranges(&self) -> &[PageRange] {
        self.current.ranges()
    }

    /// Starts a new interval, in which all ranges are retried, if it is due.
    pub(crate) fn age(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() >= AGAIN) {
            self.previous = std::mem::take(&mut self.current);
            self.since = None;
        }
    }

    /// Whether all of a range was refused in the current interval.
    pub(crate) fn covers(&self, range: PageRange) -> bool {
        self.current.uncovered(range).is_empty()
    }

    /// Whether any part of `ranges` was not refused in the previous interval.
    pub(crate) fn is_any_new(&self, ranges: &[PageRange]) -> bool {
        let is_new = |range: &PageRange| !self.previous.uncovered(*range).is_empty();
        ranges.iter().any(is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn a_refused_range_is_not_new_when_it_is_retried() {
        let mut refused = Refused::default();
        assert!(!refused.covers(range(10, 20)));
        assert!(refused.is_any_new(&[range(10, 20)]));
        refused.note(range(10, 20));
        assert!(refused.covers(range(10, 20)) && !refused.covers(range(10, 21)));
        refused.age();
        assert!(refused.covers(range(10, 20)), "not yet");
        refused.since = Instant::now().checked_sub(AGAIN);
        refused.age();
        assert!(!refused.covers(range(10, 20)));
        assert!(!refused.is_any_new(&[range(10, 20)]));
        assert!(refused.is_any_new(&[range(10, 20), range(30, 40)]));
    }
}
