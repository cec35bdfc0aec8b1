//! Warns once, while a run goes on, that its programs thrash under a limit that is kept.

use crate::report::{LimitKind, Statistics};
use crate::summary::{at_most, comfortable};
use std::time::{Duration, Instant};

/// Time over which waits are measured. Shorter warns of what a start or a change of phase costs.
const WINDOW: Duration = Duration::from_secs(10);
/// Part of its time for which a thrashing program waits: it takes five times as long as without a limit.
const THRASHING: f64 = 0.8;
/// Time of programs, computing or waiting, in seconds, below which they count as asleep.
const LEAST: f64 = 2.0;

/// Time of the programs since the start, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    waiting: f64,
    computing: f64,
}

/// Watches how much of their time programs wait.
#[derive(Debug)]
pub struct Thrashing {
    /// The window's beginning.
    since: Instant,
    spent: Spent,
    warned: bool,
}

impl Spent {
    fn of(statistics: &Statistics) -> Spent {
        Spent {
            waiting: statistics.waited().as_secs_f64(),
            computing: statistics.programs.program_cpu_seconds,
        }
    }

    /// The part of the time since `before` for which programs waited, if they thrashed.
    fn thrashing_since(self, before: Spent) -> Option<f64> {
        let waiting = self.waiting - before.waiting;
        // The CPU time of what ended and was not waited for is gone.
        let all = waiting + (self.computing - before.computing).max(0.0);
        (all >= LEAST && waiting / all >= THRASHING).then(|| waiting / all)
    }
}

impl Thrashing {
    /// From now on.
    pub fn new() -> Thrashing {
        Thrashing {
            since: Instant::now(),
            spent: Spent::default(),
            warned: false,
        }
    }

    /// Looks at the end of each window; only then the statistics are asked for, which read a file for each process.
    pub fn look(&mut self, statistics: impl FnOnce() -> Statistics) {
        if self.warned || self.since.elapsed() < WINDOW {
            return;
        }
        let statistics = statistics();
        let spent = Spent::of(&statistics);
        if let Some(share) = spent.thrashing_since(self.spent) {
            log::warn!("{}", warning(share, &statistics));
            self.warned = true;
        }
        self.since = Instant::now();
        self.spent = spent;
    }
}

fn warning(share: f64, statistics: &Statistics) -> String {
    let memfold = std::process::id();
    let kind = statistics.limit_in_force().1;
    let flag = match kind {
        LimitKind::Total => "",
        LimitKind::Resident => " --resident",
    };
    let advice = match comfortable(statistics) {
        Some(size) => format!(
            "{} {size} would make it {} (now: memfold limit {memfold} {size}{flag})",
            kind.option(),
            at_most()
        ),
        None => format!("a larger one helps (memfold limit {memfold} SIZE{flag})"),
    };
    format!(
        "the programs thrash under this limit: in the last {} s they waited for memory for {:.0}% of their time; {advice}",
        WINDOW.as_secs(),
        share * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Programs;

    const fn spent(waiting: f64, computing: f64) -> Spent {
        Spent { waiting, computing }
    }

    #[test]
    fn what_waits_most_of_its_time_thrashes() {
        let before = spent(100.0, 20.0);
        assert!(spent(109.0, 21.0).thrashing_since(before).is_some());
        assert!(spent(105.0, 25.0).thrashing_since(before).is_none());
    }

    #[test]
    fn the_advice_is_for_the_limit_in_force() {
        let mut statistics = Statistics::new(
            &memfold_pager::Stats::default(),
            0.0,
            0,
            Programs::default(),
        );
        statistics.totals.resident_limit_bytes = 100 << 20;
        statistics.programs.comfortable_limit_bytes = Some(250 << 20);
        let text = warning(0.9, &statistics);
        assert!(text.contains("; --resident 250M would make it at most 5% (now: memfold limit "));
        assert!(text.ends_with(" 250M --resident)"), "{text}");
        statistics.totals.limit_bytes = 128 << 20;
        let text = warning(0.9, &statistics);
        assert!(
            text.contains("; --limit 250M") && text.ends_with(" 250M)"),
            "{text}"
        );
        statistics.programs.comfortable_limit_bytes = None;
        assert!(warning(0.9, &statistics).ends_with(" SIZE)"));
    }

    #[test]
    fn what_sleeps_does_not_thrash() {
        assert!(spent(1.0, 0.1).thrashing_since(Spent::default()).is_none());
    }

    #[test]
    fn lost_cpu_time_does_not_count() {
        let share = spent(109.0, 15.0).thrashing_since(spent(100.0, 20.0));
        assert_eq!(share, Some(1.0));
    }
}
