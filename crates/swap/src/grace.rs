//! Read-side critical sections of loads, and grace periods for migration.
//!
//! A load reads an entry and then the data at its position, without a lock. A migration that has
//! changed the position must not free the old data before all loads that may have read the old
//! entry are done. This is `McKenney`'s sleepable RCU: a reader raises a count while it reads; there
//! are two, so that new readers cannot delay the waiter forever.

use crate::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering::*, fence},
    lock, pause,
};

#[derive(Debug)]
#[repr(align(128))]
struct Lane {
    reading: [AtomicUsize; 2],
}

/// The read-side critical sections of a space.
#[derive(Debug)]
pub(crate) struct Grace {
    /// The count that new readers raise.
    phase: AtomicUsize,
    lanes: Box<[Lane]>,
    waiter: Mutex<()>,
}

/// A read-side critical section, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Reading<'a>(&'a AtomicUsize);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        // Release: the reads happen before what follows the grace period.
        self.0.fetch_sub(1, Release);
    }
}

impl Grace {
    pub(crate) fn new(lanes: usize) -> Self {
        let lane = |_| Lane {
            reading: [AtomicUsize::new(0), AtomicUsize::new(0)],
        };
        Self {
            phase: AtomicUsize::new(0),
            lanes: (0..lanes).map(lane).collect(),
            waiter: Mutex::new(()),
        }
    }

    /// Enters a read-side critical section: either it sees what was written before a wait, or the
    /// wait covers it.
    #[inline]
    pub(crate) fn enter(&self, lane: usize) -> Reading<'_> {
        let phase = self.phase.load(Relaxed);
        let count = &self.lanes[lane % self.lanes.len()].reading[phase];
        count.fetch_add(1, SeqCst);
        // On x86-64 the addition is a full fence itself.
        if cfg!(any(not(target_arch = "x86_64"), loom, miri)) {
            fence(SeqCst);
        }
        Reading(count)
    }

    /// Waits for a grace period: until every reader that entered before the call has left. The
    /// caller must not be in a read-side critical section.
    pub(crate) fn wait(&self) {
        let _waiter = lock(&self.waiter);
        fence(SeqCst);
        let phase = self.phase.load(Relaxed);
        // Only readers that loaded the phase long ago still enter here, so it drains.
        self.wait_for_none(phase ^ 1);
        self.phase.store(phase ^ 1, Relaxed);
        self.wait_for_none(phase);
    }

    fn wait_for_none(&self, phase: usize) {
        for lane in &self.lanes {
            let mut times = 0;
            while lane.reading[phase].load(Acquire) != 0 {
                pause(times);
                times = times.saturating_add(1);
            }
        }
    }
}
