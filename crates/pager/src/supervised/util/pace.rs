//! The pace of looks at all programs, which take the longer the more programs there are.

use crate::time::Instant;
use std::time::Duration;

/// The longest interval. Longer takes less of a CPU with a thousand programs, and delays what is looked for.
const LONGEST: Duration = Duration::from_secs(1);

/// When to look again: at an interval, or less often so that looks take a small part of a CPU. One thread owns it.
#[derive(Debug)]
pub(crate) struct Pace {
    shortest: Duration,
    /// The interval in times of the CPU time that a look takes.
    rest: u32,
    /// CPU time that a look at one program takes, averaged over looks.
    cost: Duration,
    last: Instant,
}

impl Pace {
    /// A first look is due after `shortest`. Looks take one part of a CPU in `rest` at most: a larger value looks less
    /// often where there are many programs.
    pub(crate) fn new(shortest: Duration, rest: u32) -> Pace {
        Pace {
            shortest,
            rest,
            cost: Duration::ZERO,
            last: Instant::now(),
        }
    }

    /// Whether a look at so many programs is due.
    pub(crate) fn is_due(&self, programs: usize) -> bool {
        self.last.elapsed() >= self.interval(programs)
    }

    /// Notes that a look at so many programs took so much CPU time until now.
    pub(crate) fn note(&mut self, programs: usize, took: Duration) {
        let programs = u32::try_from(programs).unwrap_or(u32::MAX).max(1);
        self.cost = (self.cost * 3 + took / programs) / 4;
        self.last = Instant::now();
    }

    fn interval(&self, programs: usize) -> Duration {
        let programs = u32::try_from(programs).unwrap_or(u32::MAX);
        let rest = self.cost.saturating_mul(self.rest).saturating_mul(programs);
        self.shortest.max(rest.min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_done_less_often() {
        let mut pace = Pace::new(Duration::from_millis(10), 400);
        assert!(!pace.is_due(1), "it has begun just now");
        for _ in 0..40 {
            pace.note(1, Duration::from_micros(20));
        }
        assert_eq!(pace.interval(1), Duration::from_millis(10));
        for _ in 0..40 {
            pace.note(100, Duration::from_millis(2));
        }
        let interval = pace.interval(100);
        assert!(interval > Duration::from_millis(700), "{interval:?}");
        assert_eq!(pace.interval(1000), LONGEST);
        // Most of them have ended.
        assert_eq!(pace.interval(1), Duration::from_millis(10));
        pace.last = pace.last.checked_sub(interval).unwrap();
        assert!(pace.is_due(100));
    }
}
