//! Scheduling priority of the reclaimer.
//!
//! Like the handlers, the reclaimer runs at higher priority than programs where it may hold a gate or
//! lock that a fault needs. Most of its time it only reads and compresses pages: then it runs at lower
//! priority than programs while there is room, and at the same priority while room is short.

use memfold_sys::thread::{self, Standing};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The reclaimer's priority. The reclaimer changes it; any thread calls
/// [`ReclaimerPriority::note_pressure`]. Without the privilege to raise it again (`CAP_SYS_NICE`), the
/// priority is never changed.
///
/// `pressed` and `yielding` are `SeqCst`: `note_pressure` and `yield_to_programs` each write one flag and
/// then read the other, and at least one of them must see the other's write. `thread` is Relaxed, as it
/// is set once.
#[derive(Debug, Default)]
pub(crate) struct ReclaimerPriority {
    /// TID of the reclaimer; 0 before it runs, and if it may not raise its priority.
    thread: AtomicU32,
    /// Room is short.
    pressed: AtomicBool,
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

    /// Notes that room is short: a yielding reclaimer gets the priority of programs. If it stops
    /// yielding at the same moment, it may keep that priority, instead of a higher one, until it yields
    /// again.
    pub(crate) fn note_pressure(&self) {
        if let Some(thread) = self.thread()
            && !self.pressed.swap(true, Ordering::SeqCst)
            && self.yielding.load(Ordering::SeqCst)
        {
            thread::set_standing(thread, Standing::Equal);
        }
    }

    /// Notes that there is room. Called by the reclaimer.
    pub(crate) fn note_room(&self) {
        self.pressed.store(false, Ordering::SeqCst);
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
            let pressed = self.pressed.load(Ordering::SeqCst);
            if pressed {
                thread::set_standing(thread, Standing::Equal);
            } else {
                thread::step_behind();
            }
            // Pressure noted before this load may have set the priority before the call above, which
            // overwrote it; pressure noted later sets it after the call.
            if self.pressed.load(Ordering::SeqCst) == pressed {
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
            standing.note_pressure();
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
    fn the_reclaimer_yields_unless_room_is_short() {
        let standing = ReclaimerPriority::default();
        if !begin(&standing) {
            return;
        }
        assert_eq!(nice(), -10);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), 10);
        std::thread::scope(|scope| scope.spawn(|| standing.note_pressure()).join())
            .expect("no panic");
        assert_eq!(nice(), 0);
        drop(way);
        assert_eq!(nice(), -10);
        let way = standing.yield_to_programs();
        assert_eq!(nice(), 0, "still pressed");
        drop(way);
        standing.note_room();
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
                    standing.note_pressure();
                    done.wait();
                }
            });
            for round in 0..ROUNDS {
                standing.note_room();
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
