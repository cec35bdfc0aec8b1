//! Read-side critical sections, and a compactor that waits for a grace period.
//!
//! This is sleepable RCU (P. `McKenney`'s SRCU) with counts for each lane: a reader raises a count,
//! reads, and lowers it; before memory is reused that readers may still see, every count must have
//! been zero once. Each lane has two counts, so that new readers use one while the other drains and
//! cannot delay the waiter forever.

use crate::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
    full_fence_after_rmw, lock, pause,
};

#[derive(Debug)]
#[repr(align(64))]
struct Lane {
    active: [AtomicUsize; 2],
}

#[derive(Debug)]
pub(crate) struct Epoch {
    /// Which of the two counts new readers use.
    phase: AtomicUsize,
    lanes: Box<[Lane]>,
    /// Held by the waiting thread.
    waiter: Mutex<()>,
}

/// A reader that is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    count: &'a AtomicUsize,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        // Release: the reads happen before what follows the grace period.
        self.count.fetch_sub(1, Ordering::Release);
    }
}

impl Epoch {
    /// `None` if the heap refuses memory.
    pub(crate) fn new(lanes: usize) -> Option<Self> {
        let lane = || Lane {
            active: [AtomicUsize::new(0), AtomicUsize::new(0)],
        };
        Some(Self {
            phase: AtomicUsize::new(0),
            lanes: crate::boxed(lanes, lane)?,
            waiter: Mutex::new(()),
        })
    }

    /// Enters a read-side critical section. Its loads see everything that a thread whose wait does
    /// not cover it had written before that wait.
    #[inline]
    pub(crate) fn enter(&self, lane: usize) -> Reader<'_> {
        let phase = self.phase.load(Ordering::Relaxed);
        let count = &self.lanes[lane].active[phase];
        count.fetch_add(1, Ordering::SeqCst);
        full_fence_after_rmw();
        Reader { count }
    }

    /// Waits until every reader that had entered before the call has left.
    ///
    /// For each lane and for each of its two counts this sees a zero after the call began, so a
    /// reader counted there before has left. A reader that raises a count later than the fence
    /// sees everything written before the call.
    pub(crate) fn wait_for_readers(&self) {
        let _waiter = lock(&self.waiter);
        crate::sync::atomic::fence(Ordering::SeqCst);
        let phase = self.phase.load(Ordering::Relaxed);
        // Only readers that loaded the phase long ago still enter here, so it drains.
        self.wait_for_zero(phase ^ 1);
        self.phase.store(phase ^ 1, Ordering::Relaxed);
        self.wait_for_zero(phase);
    }

    fn wait_for_zero(&self, phase: usize) {
        for lane in &self.lanes {
            let mut times = 0;
            while lane.active[phase].load(Ordering::Acquire) != 0 {
                pause(times);
                times = times.saturating_add(1);
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    /// A word that a compactor replaces, and the two places it can name. The old place is reused
    /// after the grace period, when no reader may look at it. Loom's cells panic if one does.
    struct Moving {
        epoch: Epoch,
        word: AtomicUsize,
        places: [UnsafeCell<usize>; 2],
    }

    #[test]
    fn an_old_place_is_not_reused_under_a_reader() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let moving = Arc::new(Moving {
                epoch: Epoch::new(1).unwrap(),
                word: AtomicUsize::new(0),
                places: [UnsafeCell::new(7), UnsafeCell::new(0)],
            });
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let moving = moving.clone();
                    thread::spawn(move || {
                        let _reader = moving.epoch.enter(0);
                        let word = moving.word.load(Ordering::Acquire);
                        // SAFETY: the place holds the object until all current readers have left.
                        let found = moving.places[word].with(|place| unsafe { *place });
                        assert_eq!(found, 7);
                    })
                })
                .collect();
            // SAFETY: the new place is not published yet, and the old one is not written.
            moving.places[1].with_mut(|place| unsafe { *place = 7 });
            moving.word.store(1, Ordering::Release);
            moving.epoch.wait_for_readers();
            // SAFETY: readers that may have loaded the old word have left: this is what is tested.
            moving.places[0].with_mut(|place| unsafe { *place = 9 });
            readers
                .into_iter()
                .for_each(|reader| reader.join().unwrap());
        });
    }
}
