//! How the reclaimer stands among the other threads of its CPU.
//!
//! It goes before the programs, as the handlers do, wherever it may hold what they wait for: a gate,
//! a lock. Most of its time it only reads and compresses pages. That is nobody's hurry while there is
//! room, and it makes way: a program that lacks nothing is not to wait for it. Where there is little
//! room, it takes its share.

use memfold_sys::thread::{self, Standing};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// See the module. All of it is best effort: without the privilege to rise again, the reclaimer
/// stands as any other thread.
#[derive(Debug, Default)]
pub struct ReclaimerPriority {
    /// The reclaimer's thread; 0 before it runs, and where it may not rise again.
    thread: AtomicU32,
    pressed: AtomicBool,
    yielding: AtomicBool,
}

impl ReclaimerPriority {
    /// Makes the calling thread the one whose standing this is.
    pub fn begin(&self) {
        let thread = thread::current_id();
        if thread::set_standing(thread, Standing::Before) {
            self.thread.store(thread, Ordering::Relaxed);
        } else {
            thread::set_standing(thread, Standing::Equal);
        }
    }

    /// The thread, if it may rise again.
    fn thread(&self) -> Option<u32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0)
    }

    /// There is little room: the reclaimer takes its share. From any thread. (Should it end making way
    /// at this very moment, it may be left at its share where it is to go before: until the next time.)
    pub fn note_pressure(&self) {
        if let Some(thread) = self.thread()
            && !self.pressed.swap(true, Ordering::SeqCst)
            && self.yielding.load(Ordering::SeqCst)
        {
            thread::set_standing(thread, Standing::Equal);
        }
    }

    /// There is room: it makes way. To be called by the reclaimer.
    pub fn note_room(&self) {
        self.pressed.store(false, Ordering::SeqCst);
    }

    /// Lets the reclaimer, who calls this and holds nothing that others wait for, make way until the
    /// guard is dropped.
    pub fn yield_to_programs(&self) -> Yielding<'_> {
        if let Some(thread) = self.thread() {
            self.yielding.store(true, Ordering::SeqCst);
            self.settle(thread);
        }
        Yielding(self)
    }

    /// Lets the reclaimer, who calls this, make way or not.
    fn settle(&self, thread: u32) {
        loop {
            let pressed = self.pressed.load(Ordering::SeqCst);
            if pressed {
                thread::set_standing(thread, Standing::Equal);
            } else {
                thread::step_behind();
            }
            // Whoever pressed before this look may have done so before that call, which undid it;
            // whoever does afterwards has the last word.
            if self.pressed.load(Ordering::SeqCst) == pressed {
                return;
            }
        }
    }
}

/// See [`ReclaimerPriority::yield_to_programs`].
#[must_use = "the thread makes way until this is dropped"]
pub struct Yielding<'a>(&'a ReclaimerPriority);

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

    /// `false` where a thread may not rise.
    fn begin(standing: &ReclaimerPriority) -> bool {
        standing.begin();
        if nice() == 0 {
            skip("the privilege to rise (CAP_SYS_NICE)");
            standing.note_pressure();
            drop(standing.yield_to_programs());
            assert_eq!(
                nice(),
                0,
                "a reclaimer that cannot rise again does not make way"
            );
        }
        nice() != 0
    }

    #[test]
    fn the_reclaimer_makes_way_unless_it_is_pressed() {
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
    fn who_presses_while_it_begins_to_make_way_is_heard() {
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
