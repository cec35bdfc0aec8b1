//! The governor's rest while no program does anything.
//!
//! Near the limit the governor samples all programs each millisecond, as what is not registered grows without a message.
//! Where the programs sleep, that would be most of what memfold does. So after a second without a message and without a
//! change of the resident size the governor looks so often only that its looks take 1/200 of a CPU. Any message wakes it.
//! A program that begins to touch new memory before it touches any that is out, or registered, is seen at the next look.
//! So the interval is no longer than a program takes to grow by what is tolerated above the limit, unless such looks
//! would take more than 1/20 of a CPU.

use std::time::{Duration, Instant};

/// Time without a message and without a change after which the programs count as being at rest. Longer looks often for
/// longer.
const QUIET: Duration = Duration::from_secs(1);
/// The interval in times of the CPU time that a look takes. A larger value takes less of a CPU, and finds what grows by
/// itself later.
const REST: u32 = 200;
/// The same where a longer interval could exceed the limit by more than is tolerated. A larger value exceeds it by more
/// with many programs.
const REST_WITHIN_TOLERANCE: u32 = 20;
/// Bytes in a nanosecond that a program touches for the first time at most. A larger value looks more often.
const TOUCHED: u64 = 2;
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
    /// program was served, or something is under way. `tolerated`: bytes above the limit.
    pub(super) fn interval(
        &mut self,
        is_busy: bool,
        (resident, tolerated): (u64, u64),
        took: Duration,
    ) -> Option<Duration> {
        self.cost = (self.cost * 7 + took) / 8;
        if is_busy || resident != self.resident {
            self.since = Instant::now();
            self.resident = resident;
        }
        let is_at_rest = self.since.elapsed() >= QUIET;
        let harmless = Duration::from_nanos(tolerated / TOUCHED);
        let within = harmless.max(self.cost * REST_WITHIN_TOLERANCE);
        is_at_rest.then(|| (self.cost * REST).min(within).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: u64 = 1 << 30;
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
        assert_eq!(rest.interval(false, (7, MUCH), MILLISECOND), None);
        for (is_busy, resident) in [(true, 7), (false, 8)] {
            let mut rest = rest_after(QUIET);
            assert!(rest.interval(false, (7, MUCH), MILLISECOND).is_some());
            assert_eq!(rest.interval(is_busy, (resident, MUCH), MILLISECOND), None);
            assert_eq!(rest.interval(false, (resident, MUCH), MILLISECOND), None);
        }
    }

    #[test]
    fn looks_at_many_programs_are_fewer_but_not_rare() {
        let interval = |took: Duration, tolerated: u64| {
            let mut rest = rest_after(QUIET);
            let intervals = (0..50).map(|_| rest.interval(false, (7, tolerated), took));
            intervals.last().flatten().expect("at rest")
        };
        let few = interval(MILLISECOND / 50, MUCH);
        assert!(few > 3 * MILLISECOND && few < 5 * MILLISECOND, "{few:?}");
        assert_eq!(interval(4 * MILLISECOND, MUCH), LONGEST);
        // What is tolerated above a small limit is touched in 2 ms, but looks at many programs may take longer.
        let little = 4 << 20;
        let few = interval(MILLISECOND / 50, little);
        assert!(few < 3 * MILLISECOND, "{few:?}");
        let many = interval(2 * MILLISECOND, little);
        assert!(
            many > 30 * MILLISECOND && many <= 40 * MILLISECOND,
            "{many:?}"
        );
    }
}
