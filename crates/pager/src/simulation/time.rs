//! A clock that moves only when threads sleep.
//!
//! Each sleep moves it by its whole length at once, so that time passes faster than work is done: each
//! timeout of the core comes early in some schedules.

use shuttle::thread;
use std::cell::Cell;
use std::ops::{Add, AddAssign};
use std::time::Duration;

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// A moment of the simulated clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    /// The current time.
    pub(crate) fn now() -> Instant {
        Instant(NOW.get())
    }

    /// Time since then.
    pub(crate) fn elapsed(self) -> Duration {
        NOW.get().saturating_sub(self.0)
    }

    /// Time from an earlier moment to this one.
    pub(crate) fn duration_since(self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time from an earlier moment to this one; zero if it is later.
    pub(crate) fn saturating_duration_since(self, earlier: Instant) -> Duration {
        self.duration_since(earlier)
    }

    /// A moment before this one.
    pub(crate) fn checked_sub(self, duration: Duration) -> Option<Instant> {
        self.0.checked_sub(duration).map(Instant)
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, duration: Duration) -> Instant {
        Instant(self.0 + duration)
    }
}

/// Lets time pass, and other threads run.
pub(crate) fn sleep(duration: Duration) {
    NOW.set(NOW.get() + duration);
    thread::yield_now();
}

/// Lets other threads run.
pub(crate) fn yield_now() {
    sleep(Duration::from_micros(1));
}

/// Sets the clock back to its origin. Programs are some hours old then, so that moments can lie before.
pub(crate) fn reset() {
    NOW.set(Duration::from_secs(10_000));
}
