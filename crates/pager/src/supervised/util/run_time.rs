//! How long something was waited for.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Between two looks at most so much counts: this process may have been stopped itself.
const STEP: Duration = Duration::from_millis(50);

/// Time in which others could have gone on, as far as this process ran itself. To be looked at more
/// often than every 50 ms.
#[derive(Debug)]
pub struct RunTime {
    looked: Cell<Instant>,
    total: Cell<Duration>,
}

impl RunTime {
    /// From now on.
    pub fn begin() -> RunTime {
        RunTime {
            looked: Cell::new(Instant::now()),
            total: Cell::new(Duration::ZERO),
        }
    }

    /// So long by now.
    pub fn so_far(&self) -> Duration {
        let now = Instant::now();
        let step = now.duration_since(self.looked.replace(now));
        self.total.set(self.total.get() + step.min(STEP));
        self.total.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_do_not_count_but_time_does() {
        let waited = RunTime::begin();
        for _ in 0..10_000 {
            waited.so_far();
        }
        let looked_often = waited.so_far();
        assert!(looked_often < Duration::from_secs(5), "{looked_often:?}");
        std::thread::sleep(Duration::from_millis(20));
        assert!(waited.so_far() >= looked_often + Duration::from_millis(20));
    }

    #[test]
    fn a_stop_counts_little() {
        let waited = RunTime::begin();
        std::thread::sleep(4 * STEP);
        assert!(waited.so_far() <= STEP);
    }
}
