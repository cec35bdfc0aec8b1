//! The pace of looks at all programs, which take the longer the more programs there are.

use std::time::{Duration, Instant};

/// The interval in times of the CPU time that a look takes: a larger value takes less of a CPU, and looks less often
/// where there are many programs.
const REST: u32 = 400;

/// When to look again: at an interval, or less often so that looks take 1/[`REST`] of a CPU at most. One thread owns it.
#[derive(Debug)]
pub(crate) struct Pace {
    shortest: Duration,
    /// CPU time that a look takes, averaged.
    cost: Duration,
    last: Instant,
}

impl Pace {
    /// A first look is due after `shortest`.
    pub(crate) fn new(shortest: Duration) -> Pace {
        Pace {
            shortest,
            cost: Duration::ZERO,
            last: Instant::now(),
        }
    }

    /// Whether a look is due.
    pub(crate) fn is_due(&self) -> bool {
        self.last.elapsed() >= self.interval()
    }

    /// Notes that a look took so much CPU time until now.
    pub(crate) fn note(&mut self, took: Duration) {
        self.cost = (self.cost * 3 + took) / 4;
        self.last = Instant::now();
    }

    fn interval(&self) -> Duration {
        self.shortest.max(self.cost * REST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_done_less_often() {
        let mut pace = Pace::new(Duration::from_millis(10));
        assert!(!pace.is_due(), "it has begun just now");
        for _ in 0..40 {
            pace.note(Duration::from_micros(20));
        }
        assert_eq!(pace.interval(), Duration::from_millis(10));
        for _ in 0..40 {
            pace.note(Duration::from_millis(4));
        }
        let interval = pace.interval();
        assert!(interval > Duration::from_millis(1500), "{interval:?}");
        pace.last -= interval;
        assert!(pace.is_due());
    }
}
