//! Scheduling priority of the reclaimer.
//!
//! Like the handlers, the reclaimer runs at higher priority than programs where it may hold a gate or
//! lock that a fault needs. Most of its time it only reads and compresses pages: then it runs at lower
//! priority than programs while there is room, at the same priority while room is short, and at the higher one
//! while the limit is exceeded: new memory waits for no room until it is registered.

use memfold_sys::thread::{self, Standing};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// How much room there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    /// Enough.
    None,
    /// Room is short.
    Short,
    /// Programs have outgrown the limit.
    Exceeded,
}

impl Pressure {
    /// The pressure with this discriminant.
    const fn of(number: u8) -> Pressure {
        match number {
            0 => Pressure::None,
            1 => Pressure::Short,
            _ => Pressure::Exceeded,
        }
    }

    /// Where a thread stands that compresses.
    const fn standing(self) -> Standing {
        match self {
            Pressure::None => Standing::Behind,
            Pressure::Short => Standing::Equal,
            Pressure::Exceeded => Standing::Before,
        }
    }
}

/// The reclaimer's priority. The reclaimer changes it; any thread calls
/// [`ReclaimerPriority::raise_pressure`]. Without the privilege to raise it again (`CAP_SYS_NICE`), the
/// priority is never changed.
///
/// `pressure` and `yielding` are `SeqCst`: `raise_pressure` and `yield_to_programs` each write one of them and
/// then read the other, and at least one of them must see the other's write. `thread` is Relaxed, as it
/// is set once.
#[derive(Debug, Default)]
pub(crate) struct ReclaimerPriority {
    /// TID of the reclaimer; 0 before it runs, and if it may not raise its priority.
    thread: AtomicU32,
    /// A [`Pressure`].
    pressure: AtomicU8,
    /// The reclaimer yields to programs.
    yielding: AtomicBool,
}

impl ReclaimerPriority {
    /// Makes the calling thread the reclaimer, or one that helps it, and raises its priority. Returns whether it may.
    pub(crate) fn begin(&self) -> bool {
        let thread = thread::current_id();
        let may_raise = thread::set_standing(thread, Standing::Before);
        if may_raise {
            self.thread.store(thread, Ordering::Relaxed);
        } else {
            thread::set_standing(thread, Standing::Equal);
        }
        may_raise
    }

    /// The reclaimer, if it may raise its priority.
    fn thread(&self) -> Option<u32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0)
    }

    /// Notes that there is at least such a pressure: a yielding reclaimer gets its priority. If it stops
    /// yielding at the same moment, it may keep that priority, instead of a higher one, until it yields
    /// again.
    pub(crate) fn raise_pressure(&self, pressure: Pressure) {
        if let Some(thread) = self.thread()
            && self.pressure.fetch_max(pressure as u8, Ordering::SeqCst) < pressure as u8
            && self.yielding.load(Ordering::SeqCst)
        {
            thread::set_standing(thread, pressure.standing());
        }
    }

    /// Notes how much room there is. Called by the reclaimer, while it does not yield.
    pub(crate) fn set_pressure(&self, pressure: Pressure) {
        self.pressure.store(pressure as u8, Ordering::SeqCst);
    }

    /// How much room there is.
    pub(crate) fn pressure(&self) -> Pressure {
        Pressure::of(self.pressure.load(Ordering::SeqCst))
    }

    /// Yields to programs until the guard is dropped. Called by the reclaimer, which holds no lock that
    /// a fault needs.
    pub(crate) fn yield_to_programs(&self) -> Yielding<'_> {
        if let Some(thread) = self.thread() {
            self.yielding.store(true, Ordering::SeqCst);
            self.apply(thread);
        }
        Yielding(self)
    }

    /// Sets the priority of a yielding reclaimer. Called by the reclaimer.
    fn apply(&self, thread: u32) {
        loop {
            let pressure = self.pressure();
            if pressure == Pressure::None {
                thread::step_behind();
            } else {
                thread::set_standing(thread, pressure.standing());
            }
            // Pressure noted before this load may have set the priority before the call above, which
            // overwrote it; pressure noted later sets it after the call.
            if self.pressure() == pressure {
                return;
            }
        }
    }
}

/// Guard of [`ReclaimerPriority::yield_to_programs`]; raises the reclaimer's priority again on drop.
#[must_use = "the thread yields until this is dropped"]
pub(crate) struct Yielding<'a>(&'a ReclaimerPriority);

impl Drop for Yielding<'_> {
    fn drop(&mut self) {
        if let Some(thread) = self.0.thread() {
            self.0.yielding.store(false, Ordering::SeqCst);
            thread::set_standing(thread, Standing::Before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::skip;
    use std::sync::Barrier;

    /// The nice value of the calling thread.
    fn nice() -> i32 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("it can be read");
        let (_, fields) = stat.rsplit_once(") ").expect("the name is in brackets");
        let nice = fields.split(' ').nth(16).expect("it has so many fields");
        nice.parse().expect("it is a number")
    }

    /// `false` if a thread may not raise its priority.
    fn begin(standing: &ReclaimerPriority) -> bool {
        standing.begin();
        if nice() == 0 {
            skip("the privilege to raise a priority (`CAP_SYS_NICE`)");
            standing.raise_pressure(Pressure::Short);
            drop(standing.yield_to_programs());
            assert_eq!(
                nice(),
                0,
                "a reclaimer that cannot raise its priority does not lower it"
            );
        }
        nice() != 0
    }

    #[test]
    fn the_reclaimer_yields_as_far_as_there_is_room() {
        let standing = ReclaimerPriority::default();
        if !begin(&standing) {
            return;
        }
        assert_eq!(nice(), -10);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), 10);
        std::thread::scope(|scope| {
            scope
                .spawn(|| standing.raise_pressure(Pressure::Short))
                .join()
        })
        .expect("no panic");
        assert_eq!(nice(), 0);
        drop(way);
        assert_eq!(nice(), -10);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), 0, "still short");
        std::thread::scope(|scope| {
            let raise = || standing.raise_pressure(Pressure::Exceeded);
            scope.spawn(raise).join()
        })
        .expect("no panic");
        assert_eq!(nice(), -10, "programs have outgrown the limit");
        standing.raise_pressure(Pressure::Short);
        assert_eq!(nice(), -10, "no less pressure");
        drop(way);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), -10, "still exceeded");
        drop(way);
        standing.set_pressure(Pressure::None);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), 10);
        drop(way);
    }

    #[test]
    fn pressure_while_the_reclaimer_starts_to_yield_is_not_lost() {
        const ROUNDS: usize = 2000;
        let standing = ReclaimerPriority::default();
        if !begin(&standing) {
            return;
        }
        let (together, done) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    together.wait();
                    standing.raise_pressure(Pressure::Short);
                    done.wait();
                }
            });
            for round in 0..ROUNDS {
                standing.set_pressure(Pressure::None);
                together.wait();
                for _ in 0..round % 64 {
                    std::hint::spin_loop();
                }
                let way = standing.yield_to_programs();
                done.wait();
                assert_eq!(nice(), 0, "round {round}");
                drop(way);
            }
        });
    }
}
