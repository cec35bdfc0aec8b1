//! The governor's rest while no program does anything.
//!
//! Near the limit the governor samples all programs each millisecond, as what is not registered grows without a message.
//! Where the programs sleep, that would be most of what memfold does. So after a second without a message and without a
//! change of the resident size the governor looks so often only that its looks take 1/200 of a CPU. Any message wakes it.
//! A program that begins to touch new memory before it touches any that is out, or registered, is seen at the next look.
//! So the interval is no longer than a program takes to grow by what is tolerated above the limit, unless such looks
//! would take more than 1/20 of a CPU.
//!
//! Few programs that take no CPU time are watched by timers on it instead, which end the wait (`cpu_watch.rs`). What
//! shares a program's memory without being one of its threads is seen at the next look.
//!
//! With many programs even looks are much. There the governor first reads the idle time of all CPUs: if they were idle since
//! the last look, no program grew by more than it can touch in some 10 ms, and the look waits
//! ([`Rest::is_look_needed`]).

use memfold_sys::machine::{Idle, OtherWork};
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
/// The longest interval for programs that are watched by timers. One system call that touches much memory is seen once it
/// returns, and is found by a look before. Longer lets it touch more.
const LONGEST_WATCHED: Duration = Duration::from_millis(25);
/// The same as [`LONGEST`] where all CPUs were idle since, and where looks then take more than one part of a CPU in
/// [`REST_IDLE`]. Longer finds tracers later, and programs of which only the helper is left, of many programs: those take
/// little time to begin and to end.
const LONGEST_IDLE: Duration = Duration::from_millis(400);
const LONGEST_IDLE_OF_MANY: Duration = Duration::from_secs(1);
const REST_IDLE: u32 = 400;
/// The idle time is asked for after this number of times of what a look takes, up to [`LONGEST_ASKED`], or later. Longer lets
/// many programs that wake grow for longer.
const REST_ASKED: u32 = 4;
const LONGEST_ASKED: Duration = Duration::from_millis(10);
/// Bytes by which programs that wake may exceed the limit for a moment, besides what is tolerated. Less looks more often,
/// and each wake-up of an idle CPU costs it up to 50 µs.
const AWAKENING: u64 = 8 << 20;

/// What the governor knows of the time since anything changed.
#[derive(Debug)]
pub(super) struct Rest {
    since: Instant,
    resident: u64,
    /// When the programs last took CPU time while they were watched.
    computed: Option<Instant>,
    /// CPU time of a look, averaged.
    cost: Duration,
    /// None where the kernel does not tell.
    others: Option<OtherWork>,
    /// The machine's idle time at the last look, if looks may wait, and the interval if it was not idle since.
    idle: Option<(Idle, Duration)>,
}

impl Default for Rest {
    fn default() -> Self {
        Rest {
            since: Instant::now(),
            resident: 0,
            computed: None,
            cost: Duration::ZERO,
            others: OtherWork::open().ok(),
            idle: None,
        }
    }
}

impl Rest {
    /// Whether a program may have grown since the last look, or that is long ago.
    pub(super) fn is_look_needed(&self) -> bool {
        let (Some(others), Some((idle, interval))) = (&self.others, &self.idle) else {
            return true;
        };
        let longest = (self.cost * REST_IDLE).clamp(LONGEST_IDLE, LONGEST_IDLE_OF_MANY);
        let was_idle = || others.none_since(idle);
        is_due(idle.elapsed(), (*interval, longest), was_idle)
    }

    /// CPU time of a look, averaged.
    pub(super) fn cost(&self) -> Duration {
        self.cost
    }

    /// A timer expired: programs that are not busy take CPU time, and would end each of many waits.
    pub(super) fn note_computing(&mut self) {
        self.computed = Some(Instant::now());
    }

    /// The interval to the next look, if the programs are at rest after one that took so much CPU time. `is_busy`: a
    /// program was served, or something is under way. `tolerated`: bytes above the limit. `watch` has the wait end once
    /// programs have taken so much CPU time, if it can.
    pub(super) fn interval(
        &mut self,
        is_busy: bool,
        (resident, tolerated): (u64, u64),
        took: Duration,
        watch: impl FnOnce(Duration) -> bool,
    ) -> Option<Duration> {
        self.cost = (self.cost * 7 + took) / 8;
        if is_busy || resident != self.resident {
            self.since = Instant::now();
            self.resident = resident;
        }
        self.idle = None;
        if self.since.elapsed() < QUIET {
            return None;
        }
        let harmless = Duration::from_nanos((tolerated + AWAKENING) / TOUCHED);
        if self.computed.is_none_or(|at| at.elapsed() >= QUIET) && watch(harmless) {
            return Some(LONGEST_WATCHED);
        }
        let within = harmless.max(self.cost * REST_WITHIN_TOLERANCE);
        let interval = (self.cost * REST).min(within).min(LONGEST);
        if interval <= harmless {
            return Some(interval);
        }
        let idle = self.others.as_ref().and_then(|others| others.now().ok());
        self.idle = idle.map(|idle| (idle, interval));
        let asked = harmless.max((self.cost * REST_ASKED).min(LONGEST_ASKED));
        Some(idle.map_or(interval, |_| asked.min(interval)))
    }
}

/// Whether a look is due so long after the last one: after an interval, or after a longer one if all CPUs were idle since.
fn is_due(
    elapsed: Duration,
    (interval, longest): (Duration, Duration),
    was_idle: impl FnOnce() -> bool,
) -> bool {
    elapsed >= longest || elapsed >= interval && !was_idle()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: u64 = 1 << 30;
    const MILLISECOND: Duration = Duration::from_millis(1);
    /// Programs that cannot be watched.
    const CANNOT: fn(Duration) -> bool = |_| false;

    fn rest_after(time: Duration) -> Rest {
        Rest {
            since: Instant::now().checked_sub(time).expect("some uptime"),
            resident: 7,
            computed: None,
            cost: Duration::ZERO,
            others: None,
            idle: None,
        }
    }

    #[test]
    fn programs_are_at_rest_once_nothing_has_changed_for_a_while() {
        let mut rest = rest_after(QUIET / 2);
        assert_eq!(rest.interval(false, (7, MUCH), MILLISECOND, CANNOT), None);
        for (is_busy, resident) in [(true, 7), (false, 8)] {
            let mut rest = rest_after(QUIET);
            assert!(
                rest.interval(false, (7, MUCH), MILLISECOND, CANNOT)
                    .is_some()
            );
            assert_eq!(
                rest.interval(is_busy, (resident, MUCH), MILLISECOND, CANNOT),
                None
            );
            assert_eq!(
                rest.interval(false, (resident, MUCH), MILLISECOND, CANNOT),
                None
            );
        }
    }

    #[test]
    fn programs_that_are_watched_are_looked_at_rarely() {
        let mut rest = rest_after(QUIET);
        let mut asked = Duration::ZERO;
        let watch = |time| {
            asked = time;
            true
        };
        let tolerated = 4 << 20;
        let interval = rest.interval(false, (7, tolerated), MILLISECOND, watch);
        assert_eq!(interval, Some(LONGEST_WATCHED));
        assert!(rest.is_look_needed(), "it may have been the timer");
        let touched = asked.as_nanos() as u64 * TOUCHED;
        assert_eq!(touched, tolerated + AWAKENING);
        let watch = |_| unreachable!("programs that do something are sampled");
        rest.note_computing();
        let interval = rest.interval(false, (7, tolerated), MILLISECOND, watch);
        assert!(interval.is_some_and(|interval| interval < LONGEST_WATCHED));
        let mut busy = rest_after(QUIET);
        assert_eq!(busy.interval(true, (7, MUCH), MILLISECOND, watch), None);
    }

    #[test]
    fn looks_at_many_programs_are_fewer_but_not_rare() {
        let interval = |took: Duration, tolerated: u64| {
            let mut rest = rest_after(QUIET);
            let intervals = (0..50).map(|_| rest.interval(false, (7, tolerated), took, CANNOT));
            intervals.last().flatten().expect("at rest")
        };
        let few = interval(MILLISECOND / 50, MUCH);
        assert!(few > 3 * MILLISECOND && few < 5 * MILLISECOND, "{few:?}");
        assert_eq!(interval(4 * MILLISECOND, MUCH), LONGEST);
        // What is tolerated above a small limit is touched in 6 ms, but looks at many programs may take longer.
        let little = 4 << 20;
        let few = interval(MILLISECOND / 10, little);
        assert!(few > 6 * MILLISECOND && few < 7 * MILLISECOND, "{few:?}");
        let many = interval(2 * MILLISECOND, little);
        assert!(
            many > 30 * MILLISECOND && many <= 40 * MILLISECOND,
            "{many:?}"
        );
    }

    #[test]
    fn looks_that_take_long_wait_until_others_have_worked() {
        let with_others = |took: Duration| {
            let mut rest = Rest {
                others: OtherWork::open().ok(),
                ..rest_after(QUIET)
            };
            let intervals = (0..50).map(|_| rest.interval(false, (7, 4 << 20), took, CANNOT));
            let interval = intervals.last().flatten().expect("at rest");
            (rest, interval)
        };
        let (few, _) = with_others(MILLISECOND / 50);
        assert!(few.is_look_needed(), "it is as cheap as the question");
        let (many, interval) = with_others(2 * MILLISECOND);
        assert!(
            interval > 7 * MILLISECOND && interval <= 8 * MILLISECOND,
            "it asks instead: {interval:?}"
        );
        assert_eq!(with_others(20 * MILLISECOND).1, LONGEST_ASKED);
        std::thread::sleep(LONGEST_IDLE_OF_MANY);
        assert!(many.is_look_needed(), "however idle the machine was");
        let intervals = (8 * MILLISECOND, LONGEST_IDLE);
        assert!(is_due(8 * MILLISECOND, intervals, || false));
        assert!(!is_due(7 * MILLISECOND, intervals, || unreachable!()));
        assert!(!is_due(LONGEST_IDLE / 2, intervals, || true));
        assert!(is_due(LONGEST_IDLE, intervals, || unreachable!()));
    }
}
