//! Mappings that cannot be registered: those with a userfaultfd of the program's own, and kinds that
//! the kernel keeps from any (`MAP_DROPPABLE`).
//!
//! Nothing tells when that ends, so they are tried again now and then. Between, they are no news: where
//! nothing but such memory is left, the limit is exceeded, and nobody is to wait for it.

use crate::page::PageRange;
use crate::range_set::RangeSet;
use std::time::{Duration, Instant};

/// After how long they are tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug, Default)]
pub struct Refused {
    lately: RangeSet,
    before: RangeSet,
    since: Option<Instant>,
}

impl Refused {
    /// Notes what the kernel refused to register.
    pub fn note(&mut self, range: PageRange) {
        self.since.get_or_insert_with(Instant::now);
        self.lately.add(range);
    }

    /// What was refused lately.
    pub fn ranges(&self) -> &[PageRange] {
        self.lately.ranges()
    }

    /// Forgets what is to be tried again.
    pub fn age(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() >= AGAIN) {
            self.before = std::mem::take(&mut self.lately);
            self.since = None;
        }
    }

    /// Whether all of a range was refused lately.
    pub fn covers(&self, range: PageRange) -> bool {
        self.lately.uncovered(range).is_empty()
    }

    /// Whether some of these were not refused when they were tried before.
    pub fn is_any_new(&self, ranges: &[PageRange]) -> bool {
        let is_new = |range: &PageRange| !self.before.uncovered(*range).is_empty();
        ranges.iter().any(is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::range;

    #[test]
    fn what_is_refused_is_no_news_when_it_is_tried_again() {
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
