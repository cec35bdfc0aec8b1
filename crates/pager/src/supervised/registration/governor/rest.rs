//! The governor's rest while no program does anything.
//!
//! Near the limit the governor samples all programs each millisecond, as what is not registered grows without a message.
//! Where the programs sleep, that would be most of what memfold does. So after a second without a message and without a
//! change of the resident size the governor looks so often only that its looks take a hundredth of a CPU at most. Any
//! message wakes it. A program that begins to touch new memory before it touches any that is out, or registered, is seen at
//! the next look.

use std::time::{Duration, Instant};

/// Time without a message and without a change after which the programs count as being at rest. Longer looks often for
/// longer.
const QUIET: Duration = Duration::from_secs(1);
/// The interval in times of the CPU time that a look takes. A larger value takes less of a CPU, and finds what grows by
/// itself later.
const REST: u32 = 200;
/// The longest interval. Longer lets programs that wake grow for longer.
const LONGEST: Duration = Duration::from_millis(100);

/// What the governor knows of the time since anything changed.
#[derive(Debug)]
pub(super) struct Rest {
    since: Instant,
    resident: u64,
    /// CPU time of a look, averaged.
    cost: Duration,
}

impl Default for Rest {
    fn default() -> Self {
        Rest {
            since: Instant::now(),
            resident: 0,
            cost: Duration::ZERO,
        }
    }
}

impl Rest {
    /// The interval to the next look, if the programs are at rest after one that took so much CPU time. `is_busy`: a
    /// program was served, or something is under way.
    pub(super) fn interval(
        &mut self,
        is_busy: bool,
        resident: u64,
        took: Duration,
    ) -> Option<Duration> {
        self.cost = (self.cost * 7 + took) / 8;
        if is_busy || resident != self.resident {
            self.since = Instant::now();
            self.resident = resident;
        }
        let is_at_rest = self.since.elapsed() >= QUIET;
        is_at_rest.then(|| (self.cost * REST).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn rest_after(time: Duration) -> Rest {
        Rest {
            since: Instant::now().checked_sub(time).expect("some uptime"),
            resident: 7,
            cost: Duration::ZERO,
        }
    }

    #[test]
    fn programs_are_at_rest_once_nothing_has_changed_for_a_while() {
        let mut rest = rest_after(QUIET / 2);
        assert_eq!(rest.interval(false, 7, MILLISECOND), None);
        for (is_busy, resident) in [(true, 7), (false, 8)] {
            let mut rest = rest_after(QUIET);
            assert!(rest.interval(false, 7, MILLISECOND).is_some());
            assert_eq!(rest.interval(is_busy, resident, MILLISECOND), None);
            assert_eq!(rest.interval(false, resident, MILLISECOND), None);
        }
    }

    #[test]
    fn looks_at_many_programs_are_fewer_but_not_rare() {
        let interval = |took: Duration| {
            let mut rest = rest_after(QUIET);
            let intervals = (0..50).map(|_| rest.interval(false, 7, took));
            intervals.last().flatten().expect("at rest")
        };
        let few = interval(MILLISECOND / 50);
        assert!(few > 3 * MILLISECOND && few < 5 * MILLISECOND, "{few:?}");
        assert_eq!(interval(4 * MILLISECOND), LONGEST);
    }
}
