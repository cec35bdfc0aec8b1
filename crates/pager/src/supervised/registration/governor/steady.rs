//! The governor's pace while many programs only fault.
//!
//! A look at every program each millisecond takes a third of a CPU with 200 of them. It is for what grows without a
//! message: copies of pages that forks share, and memory that is not registered, which a program has mapped or started
//! with. So once no program has been found to have mapped anything for a while, looks take 1/16 of a CPU at most, and are
//! 10 ms apart at most.
//!
//! Meanwhile a program may map memory and touch it. Then the machine has less that is free, which one system call
//! tells each millisecond, however many programs there are: the next look is due. It is a hint. It misses what comes from
//! the kernel's lists of free pages for each CPU (since Linux 6.7 up to some hundred MiB that were freed there lately),
//! what others free at the same time, and files that the kernel drops for it. And others may take memory.

use super::FEW;
use memfold_sys::machine::free_bytes;
use std::time::{Duration, Instant};

/// Time without a new mapping after which the programs count as steady. Longer looks often for longer.
const QUIET: Duration = Duration::from_millis(50);
/// The interval in times of the CPU time that a look takes. A larger value takes less of a CPU, and finds later what
/// grows while others free memory.
const REST: u32 = 15;
/// The longest interval. Longer lets programs grow for longer.
const LONGEST: Duration = Duration::from_millis(10);
/// Bytes of free memory that are gone since the last look when the next one is due. Less looks more often, as the kernel
/// hands out and takes back free pages in batches.
const GONE: u64 = 2 << 20;

/// What the governor knows of the time since a program mapped anything.
#[derive(Debug)]
pub(super) struct Steady {
    since: Instant,
    /// Something changed in the look that is under way. A look that registers many programs takes longer than is quiet.
    is_changed: bool,
    /// The most free memory since the last look began, if there are many programs.
    free: Option<u64>,
    /// The next look is late.
    is_late: bool,
}

impl Default for Steady {
    fn default() -> Self {
        Steady {
            since: Instant::now(),
            is_changed: false,
            free: None,
            is_late: false,
        }
    }
}

impl Steady {
    /// A program came, mapped something, or may grow for another reason.
    pub(super) fn note_change(&mut self) {
        self.is_changed = true;
    }

    /// A look begins, at this number of programs.
    pub(super) fn begin(&mut self, programs: usize) {
        self.free = (programs > FEW).then(free_bytes);
    }

    /// The interval to the next look: at least `interval`. `cost`: the CPU time of a look.
    pub(super) fn interval(&mut self, cost: Duration, interval: Duration) -> Duration {
        if std::mem::take(&mut self.is_changed) {
            self.since = Instant::now();
        }
        let longer = (cost * REST).min(LONGEST);
        self.is_late = self.free.is_some() && longer > interval && self.since.elapsed() >= QUIET;
        if self.is_late { longer } else { interval }
    }

    /// Whether the next look is late only as long as no free memory is taken.
    pub(super) fn is_late(&self) -> bool {
        self.is_late
    }

    /// Whether [`GONE`] bytes were taken, so that the next look is due.
    pub(super) fn is_look_needed(&mut self) -> bool {
        self.free
            .as_mut()
            .is_some_and(|most| is_gone(most, free_bytes()))
    }
}

/// Whether [`GONE`] bytes are gone of the most that was free.
fn is_gone(most: &mut u64, now: u64) -> bool {
    *most = now.max(*most);
    *most - now >= GONE
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn steady_for(time: Duration) -> Steady {
        Steady {
            since: Instant::now().checked_sub(time).expect("some uptime"),
            ..Steady::default()
        }
    }

    fn interval(steady: &mut Steady, programs: usize, cost: Duration) -> Duration {
        steady.begin(programs);
        steady.interval(cost, MILLISECOND)
    }

    #[test]
    fn looks_at_many_programs_that_map_nothing_are_fewer() {
        let mut steady = steady_for(QUIET);
        let many = interval(&mut steady, 200, MILLISECOND / 2);
        assert!(many > 7 * MILLISECOND && many < 8 * MILLISECOND, "{many:?}");
        assert!(steady.is_late());
        assert_eq!(interval(&mut steady, 2000, 5 * MILLISECOND), LONGEST);
        let few = interval(&mut steady, FEW, MILLISECOND / 2);
        assert_eq!((few, steady.is_late()), (MILLISECOND, false));
        let cheap = interval(&mut steady, 20, MILLISECOND / 20);
        assert_eq!((cheap, steady.is_late()), (MILLISECOND, false));
        interval(&mut steady, 200, MILLISECOND / 2);
        steady.note_change();
        // However long the look takes.
        std::thread::sleep(QUIET);
        let changed = interval(&mut steady, 200, MILLISECOND / 2);
        assert_eq!((changed, steady.is_late()), (MILLISECOND, false));
    }

    #[test]
    fn a_look_is_needed_once_free_memory_is_gone() {
        let mut most = 10 * GONE;
        assert!(!is_gone(&mut most, 9 * GONE + 1));
        assert!(is_gone(&mut most, 9 * GONE));
        // What others free does not hide what is taken then.
        assert!(!is_gone(&mut most, 20 * GONE));
        assert!(is_gone(&mut most, 19 * GONE));
    }

    #[test]
    fn what_is_free_is_asked_for_with_many_programs() {
        let mut steady = Steady::default();
        assert!(!steady.is_look_needed(), "there are few");
        steady.begin(200);
        assert!(steady.free.is_some_and(|free| free > 0));
        steady.free = Some(u64::MAX);
        assert!(steady.is_look_needed());
    }
}
