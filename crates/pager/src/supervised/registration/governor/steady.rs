//! The governor's pace while many programs only fault.
//!
//! A look at every program each millisecond takes a third of a CPU with 200 of them. It is for what grows without a
//! message: memory that is not registered, which a program has mapped or started with. So once no program has been found
//! to have mapped anything for a while, looks take 1/16 of a CPU at most, and are 10 ms apart at most.
//!
//! Meanwhile a program may map memory and touch it. Then the machine has less that is free, which one system call
//! tells each millisecond, however many programs there are: the next look is due. That may be late where others free
//! memory at the same time, and early where others take it.

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
/// Free memory that is gone since the last look when the next one is due. Less looks more often, as the kernel hands out
/// and takes back free pages in batches.
const GONE: u64 = 2 << 20;

/// What the governor knows of the time since a program mapped anything.
#[derive(Debug)]
pub(super) struct Steady {
    since: Instant,
    /// CPU time of a look, averaged.
    cost: Duration,
    /// Free memory at the last look, if the next one is late.
    free: Option<u64>,
}

impl Default for Steady {
    fn default() -> Self {
        Steady {
            since: Instant::now(),
            cost: Duration::ZERO,
            free: None,
        }
    }
}

impl Steady {
    /// A program came, mapped something, or waits for something that is under way.
    pub(super) fn note_change(&mut self) {
        self.since = Instant::now();
    }

    /// The interval to the next look at so many programs, after one that took so much CPU time: at least `interval`.
    pub(super) fn interval(
        &mut self,
        programs: usize,
        took: Duration,
        interval: Duration,
    ) -> Duration {
        self.cost = (self.cost * 7 + took) / 8;
        self.free = None;
        let longer = (self.cost * REST).min(LONGEST);
        if programs <= FEW || longer <= interval || self.since.elapsed() < QUIET {
            return interval;
        }
        self.free = Some(free_bytes());
        longer
    }

    /// Whether the next look is late only as long as no free memory is taken.
    pub(super) fn is_late(&self) -> bool {
        self.free.is_some()
    }

    /// Whether so much was taken since the last look that the next one is due.
    pub(super) fn is_look_needed(&self) -> bool {
        self.free
            .is_some_and(|before| before.saturating_sub(free_bytes()) >= GONE)
    }
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

    fn interval(steady: &mut Steady, programs: usize, took: Duration) -> Duration {
        let each = (0..50).map(|_| steady.interval(programs, took, MILLISECOND));
        each.fold(Duration::ZERO, |_, last| last)
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
        let changed = interval(&mut steady, 200, MILLISECOND / 2);
        assert_eq!((changed, steady.is_late()), (MILLISECOND, false));
    }

    #[test]
    fn a_look_is_needed_once_free_memory_is_gone() {
        let mut steady = steady_for(QUIET);
        assert!(!steady.is_look_needed(), "none is late");
        interval(&mut steady, 200, MILLISECOND / 2);
        // Of what is free now, so much more than there is.
        steady.free = Some(u64::MAX);
        assert!(steady.is_look_needed());
        steady.free = Some(0);
        assert!(!steady.is_look_needed(), "others freed some");
    }
}
