//! Waking the drainer of a pool.
//!
//! A thread that leaves work publishes it and then checks whether the drainer sleeps; the drainer
//! publishes that it sleeps and then checks for work. A full fence between the two on both sides
//! ensures that one of them sees the other.

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

/// The drainer runs, or there is none.
const AWAKE: u8 = 0;
/// The drainer sleeps to let words accumulate; a quarter of a full queue, or memory to return,
/// wakes it.
const COLLECTING: u8 = 1;
/// The drainer is idle; the next word, or memory to return, wakes it.
const IDLE: u8 = 2;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    ByTime,
    ForWork,
}

#[derive(Debug)]
pub(crate) struct DrainSignal {
    state: AtomicU8,
    /// Memory waits to be returned to the kernel by the drainer.
    give_back: AtomicBool,
    drainer: Mutex<Option<Thread>>,
    /// Whether `drainer` is set.
    present: AtomicBool,
    /// Bulk frees begun and ended.
    frees_begun: AtomicUsize,
    frees_ended: AtomicUsize,
}

/// A bulk free under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct BulkFree<'a>(&'a AtomicUsize);

impl Drop for BulkFree<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// How long there has been no bulk free, as far as the drainer has checked.
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

    /// Checks for bulk frees; returns what is left of `time` since the last one.
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
        // The push moved the tail, which a drainer checks, with a read-modify-write.
        full_fence_after_rmw();
        let state = self.state.load(Ordering::Relaxed);
        if state == IDLE || (state == COLLECTING && ring.len() >= ring.places() / 4) {
            self.wake();
        }
    }

    /// Counts a bulk free that begins.
    pub(crate) fn free_begins(&self) -> BulkFree<'_> {
        self.frees_begun.fetch_add(1, Ordering::Relaxed);
        BulkFree(&self.frees_ended)
    }

    /// Leaves freed memory to the drainer; `false` if there is none.
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

    /// The same, for the thread that then returns it: memory left later waits again.
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

    /// Sets or clears the drainer's thread.
    pub(crate) fn set_drainer(&self, drainer: Option<Thread>) {
        self.present.store(drainer.is_some(), Ordering::Relaxed);
        *lock(&self.drainer) = drainer;
    }

    /// Sleeps until there is work, unless `words_wait` already.
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

    /// Sleeps until many words wait or memory was left.
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

    /// Under loom the drainer sleeps until it is woken: a lost wake-up is reported as a deadlock.
    const FOREVER: Duration = Duration::MAX;

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
                        signal.sleep_idle(FOREVER, || ring.bytes() > 0);
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
                        signal.sleep_idle(FOREVER, || false);
                    }
                }
            },
        );
    }
}
