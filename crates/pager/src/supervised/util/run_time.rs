//! Waiting time without the time in which this process was stopped.

use crate::time::Instant;
use std::cell::Cell;
use std::time::Duration;

/// Most time that counts between two readings, as this process may have been stopped in between. A
/// larger value counts more of a stop.
const STEP: Duration = Duration::from_millis(50);

/// Elapsed time, in which other processes could make progress, less time in which this process was
/// stopped. One thread owns it and reads it more often than every 50 ms.
#[derive(Debug)]
pub(crate) struct RunTime {
    last: Cell<Instant>,
    total: Cell<Duration>,
}

impl RunTime {
    /// Starts at zero now.
    pub(crate) fn begin() -> RunTime {
        RunTime {
            last: Cell::new(Instant::now()),
            total: Cell::new(Duration::ZERO),
        }
    }

    /// The time since `begin`, of which at most [`STEP`] counts since the last reading.
    pub(crate) fn so_far(&self) -> Duration {
        let now = Instant::now();
        let step = now.duration_since(self.last.replace(now));
        self.total.set(self.total.get() + step.min(STEP));
        self.total.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_do_not_count_but_time_does() {
        let waited = RunTime::begin();
        for _ in 0..10_000 {
            waited.so_far();
        }
        let read_often = waited.so_far();
        assert!(read_often < Duration::from_secs(5), "{read_often:?}");
        crate::time::sleep(Duration::from_millis(20));
        assert!(waited.so_far() >= read_often + Duration::from_millis(20));
    }

    #[test]
    fn a_stop_counts_little() {
        let waited = RunTime::begin();
        crate::time::sleep(4 * STEP);
        assert!(waited.so_far() <= STEP);
    }
}
