//! When reclaim works, as Linux's zone watermarks say it.

/// Watermarks of free pages under a limit: larger numbers are farther from the limit.
///
/// Background reclaim starts when fewer than `low` pages are free and stops when `high` are. A thread
/// that needs a page while no more than `min` are free reclaims itself first (direct reclaim).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Watermarks {
    /// Free pages that only direct reclaim may leave.
    pub(crate) min: u64,
    /// Free pages below which background reclaim starts.
    pub(crate) low: u64,
    /// Free pages at which background reclaim stops.
    pub(crate) high: u64,
}

impl Watermarks {
    /// Whether background reclaim is to start.
    pub(crate) fn is_below_low(self, free: u64) -> bool {
        free < self.low
    }

    /// Whether background reclaim may stop.
    pub(crate) fn is_at_high(self, free: u64) -> bool {
        free >= self.high
    }

    /// Whether `pages` more leave at least `low` free: readahead may take them, as they wake no reclaim.
    pub(crate) fn has_spare(self, free: u64, pages: u64) -> bool {
        free >= self.low + pages
    }

    /// Whether taking `pages` needs direct reclaim.
    pub(crate) fn needs_direct_reclaim(self, free: u64, pages: u64) -> bool {
        free < self.min + pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reclaim_starts_below_low_and_stops_at_high() {
        let watermarks = Watermarks {
            min: 2,
            low: 10,
            high: 20,
        };
        assert!(!watermarks.is_below_low(10) && watermarks.is_below_low(9));
        assert!(watermarks.is_at_high(20) && !watermarks.is_at_high(19));
        assert!(watermarks.has_spare(15, 5) && !watermarks.has_spare(15, 6));
        assert!(watermarks.needs_direct_reclaim(5, 4) && !watermarks.needs_direct_reclaim(6, 4));
    }
}
