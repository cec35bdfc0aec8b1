//! Whether CPUs are idle, as a thread of low priority sees it.

use std::time::Duration;

/// How long a thread ran and waited for a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuWaiting {
    ran: Duration,
    waited: Duration,
}

impl CpuWaiting {
    #[cfg(test)]
    pub(crate) fn of_times(ran: Duration, waited: Duration) -> CpuWaiting {
        CpuWaiting { ran, waited }
    }

    /// Those of the calling thread, as the scheduler counts them; `None` where the kernel does not say.
    pub fn of_this_thread() -> Option<CpuWaiting> {
        CpuWaiting::parse(&std::fs::read_to_string("/proc/thread-self/schedstat").ok()?)
    }

    /// Parses nanoseconds on a CPU, nanoseconds in a run queue, and the number of times.
    fn parse(schedstat: &str) -> Option<CpuWaiting> {
        let mut fields = schedstat.split_ascii_whitespace();
        let mut time = || Some(Duration::from_nanos(fields.next()?.parse().ok()?));
        Some(CpuWaiting {
            ran: time()?,
            waited: time()?,
        })
    }

    /// What was added since an earlier reading.
    #[must_use]
    pub fn since(self, earlier: CpuWaiting) -> CpuWaiting {
        CpuWaiting {
            ran: self.ran.saturating_sub(earlier.ran),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }

    /// Whether CPUs had little else to do: at its low priority, the thread hardly waited for one.
    pub fn is_idle(self) -> bool {
        self.waited <= self.ran / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ran: u64, waited: u64) -> CpuWaiting {
        CpuWaiting::of_times(Duration::from_millis(ran), Duration::from_millis(waited))
    }

    #[test]
    fn the_schedulers_counts_are_read() {
        let read = CpuWaiting::parse("2500000 1000000 17\n");
        assert_eq!(
            read,
            Some(CpuWaiting {
                ran: Duration::from_micros(2500),
                waited: Duration::from_millis(1),
            })
        );
        assert_eq!(CpuWaiting::parse(""), None);
        assert_eq!(CpuWaiting::parse("1 x 2"), None);
        assert!(at(9, 5).since(at(5, 4)).is_idle());
        assert!(!at(9, 6).since(at(5, 4)).is_idle());
    }
}
