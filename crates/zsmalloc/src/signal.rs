//! How a pool wakes its drainer.
//!
//! Whoever leaves work first makes it visible and then looks whether the drainer sleeps; a drainer
//! first says that it sleeps and then looks for work. With a full fence between the two on either
//! side one of them sees the other, so no work is left to a sleeping drainer.

use std::time::{Duration, Instant};

use crate::{
    ring::Ring,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence},
        full_fence_after_rmw, lock,
        thread::{self, Thread},
    },
};

/// No drainer sleeps: it runs, or there is none.
const AWAKE: u8 = 0;
/// It sleeps a moment so that more words come together; a well filled queue wakes it, and memory
/// to give back.
const COLLECTING: u8 = 1;
/// It found nothing to do; the next word wakes it, and memory to give back.
const IDLE: u8 = 2;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    ByTime,
    ForWork,
}

#[derive(Debug)]
pub(crate) struct DrainSignal {
    state: AtomicU8,
    /// There is memory that waits for the drainer to give it back.
    give_back: AtomicBool,
    drainer: Mutex<Option<Thread>>,
    /// Whether `drainer` is there.
    present: AtomicBool,
    /// How many bulk frees began and ended.
    frees_begun: AtomicUsize,
    frees_ended: AtomicUsize,
}

/// A bulk free, until it is dropped.
#[derive(Debug)]
pub(crate) struct GoingOn<'a>(&'a AtomicUsize);

impl Drop for GoingOn<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Since when no bulk free has been going on, as far as one has looked.
#[derive(Debug)]
pub(crate) struct Lull {
    begun: usize,
    since: Instant,
}

impl Lull {
    pub(crate) fn new() -> Self {
        Self {
            begun: 0,
            since: Instant::now(),
        }
    }

    /// Looks whether it lasts; how much of `time` is left if so.
    pub(crate) fn left(&mut self, signal: &DrainSignal, time: Duration) -> Duration {
        let begun = signal.frees_begun.load(Ordering::Relaxed);
        if begun != self.begun || begun != signal.frees_ended.load(Ordering::Relaxed) {
            *self = Self {
                begun,
                since: Instant::now(),
            };
        }
        time.saturating_sub(self.since.elapsed())
    }
}

impl DrainSignal {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
            give_back: AtomicBool::new(false),
            drainer: Mutex::new(None),
            present: AtomicBool::new(false),
            frees_begun: AtomicUsize::new(0),
            frees_ended: AtomicUsize::new(0),
        }
    }

    /// Wakes the drainer for a word that was pushed just now.
    #[inline]
    pub(crate) fn after_push(&self, ring: &Ring) {
        // The push moved the tail, which is what a drainer looks at, with a read-modify-write.
        full_fence_after_rmw();
        let state = self.state.load(Ordering::Relaxed);
        if state == IDLE || (state == COLLECTING && ring.len() >= ring.places() / 4) {
            self.wake();
        }
    }

    /// Notes that a bulk free begins.
    pub(crate) fn free_begins(&self) -> GoingOn<'_> {
        self.frees_begun.fetch_add(1, Ordering::Relaxed);
        GoingOn(&self.frees_ended)
    }

    /// Leaves it to the drainer to give memory back; `false` if there is none.
    pub(crate) fn leave_memory(&self) -> bool {
        if !self.present.load(Ordering::Relaxed) {
            return false;
        }
        // Release: the drainer that takes this sees the memory.
        self.give_back.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) != AWAKE {
            self.wake();
        }
        true
    }

    /// Whether memory waits to be given back.
    pub(crate) fn memory_waits(&self) -> bool {
        self.give_back.load(Ordering::Relaxed)
    }

    /// The same, for the one who then gives it back: what is left from here on waits again.
    pub(crate) fn take_memory(&self) -> bool {
        self.memory_waits() && self.give_back.swap(false, Ordering::AcqRel)
    }

    #[cold]
    fn wake(&self) {
        if self.state.swap(AWAKE, Ordering::AcqRel) != AWAKE
            && let Some(drainer) = &*lock(&self.drainer)
        {
            drainer.unpark();
        }
    }

    /// Says which thread is the drainer, if any.
    pub(crate) fn set_drainer(&self, drainer: Option<Thread>) {
        self.present.store(drainer.is_some(), Ordering::Relaxed);
        *lock(&self.drainer) = drainer;
    }

    /// Lets the drainer sleep until there is work, unless `words_wait` already.
    pub(crate) fn sleep_idle(&self, at_most: Duration, words_wait: impl Fn() -> bool) -> Woken {
        self.state.swap(IDLE, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let work = words_wait() || self.memory_waits();
        if !work {
            thread::park_timeout(at_most);
        }
        let woken = self.state.swap(AWAKE, Ordering::AcqRel) == AWAKE;
        if work || woken {
            Woken::ForWork
        } else {
            Woken::ByTime
        }
    }

    /// Lets the drainer sleep until many words wait or memory was left to it.
    pub(crate) fn sleep_collecting(&self, at_most: Duration) {
        self.state.store(COLLECTING, Ordering::Relaxed);
        thread::park_timeout(at_most);
        self.state.swap(AWAKE, Ordering::AcqRel);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::{geometry::PageNumber, word::ObjectWord};
    use loom::sync::Arc;

    fn word(n: u32) -> ObjectWord {
        ObjectWord::new(0, PageNumber(n), 0)
    }

    /// Loom's drainer sleeps for ever unless it is woken, which would be reported as a deadlock.
    const FOR_EVER: Duration = Duration::MAX;

    /// Runs `leave_work` on this thread and `drain` on another, in all interleavings.
    fn model<T: Send + Sync + 'static>(
        shared: impl Fn() -> (DrainSignal, T) + Send + Sync + 'static,
        leave_work: impl Fn(&DrainSignal, &T) + Send + Sync + 'static,
        drain: impl Fn(&DrainSignal, &T) + Copy + Send + Sync + 'static,
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let shared = Arc::new(shared());
            let (signal, work) = &*shared;
            let drainer = {
                let shared = shared.clone();
                loom::thread::spawn(move || drain(&shared.0, &shared.1))
            };
            signal.set_drainer(Some(drainer.thread().clone()));
            leave_work(signal, work);
            drainer.join().unwrap();
        });
    }

    #[test]
    fn a_word_is_not_left_to_a_sleeping_drainer() {
        model(
            || (DrainSignal::new(), Ring::new(2, 100).unwrap()),
            |signal, ring| {
                for n in 0..2 {
                    assert!(ring.push(word(n), 10));
                    signal.after_push(ring);
                }
            },
            |signal, ring| {
                let mut left = 2;
                while left > 0 {
                    if ring.bytes() == 0 {
                        signal.sleep_idle(FOR_EVER, || ring.bytes() > 0);
                    }
                    let taken = ring.take(&mut [word(9); 2], |_| 10);
                    left -= taken;
                    if taken == 0 {
                        crate::sync::yield_now();
                    }
                }
            },
        );
    }

    #[test]
    fn memory_is_not_left_to_a_sleeping_drainer() {
        model(
            || (DrainSignal::new(), AtomicUsize::new(0)),
            |signal, memory| {
                for _ in 0..2 {
                    memory.fetch_add(1, Ordering::Relaxed);
                    assert!(signal.leave_memory());
                }
            },
            |signal, memory| {
                let mut left = 2;
                while left > 0 {
                    if signal.take_memory() {
                        left -= memory.swap(0, Ordering::Relaxed);
                    } else {
                        signal.sleep_idle(FOR_EVER, || false);
                    }
                }
            },
        );
    }
}
