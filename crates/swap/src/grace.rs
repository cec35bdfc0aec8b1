//! Loads that announce themselves, and a migration that waits for them.
//!
//! A load reads an entry and then the data that the entry names; it holds no lock. A migration
//! that has made the entry name other data must not free the old data before all loads that may
//! have read the old entry are over. This is McKenney's sleepable RCU: a reader raises a count
//! while it reads, one of two so that a stream of new readers cannot hold the waiter up for ever.

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

/// The loads of a space.
#[derive(Debug)]
pub(crate) struct Grace {
    /// Which of the two counts new readers raise.
    phase: AtomicUsize,
    lanes: Box<[Lane]>,
    waiter: Mutex<()>,
}

/// A load under way, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Reading<'a>(&'a AtomicUsize);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        // Release: what the reader read happens before what follows the wait.
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

    /// Announces a reader. Either it sees what was written before a wait, or the wait sees it.
    #[inline]
    pub(crate) fn enter(&self, lane: usize) -> Reading<'_> {
        let phase = self.phase.load(Relaxed);
        let count = &self.lanes[lane % self.lanes.len()].reading[phase];
        count.fetch_add(1, SeqCst);
        // On x86-64 the instruction before is a full fence itself.
        if cfg!(any(not(target_arch = "x86_64"), loom, miri)) {
            fence(SeqCst);
        }
        Reading(count)
    }

    /// Waits until every reader that entered before the call has left. The caller is none.
    pub(crate) fn wait(&self) {
        let _waiter = lock(&self.waiter);
        fence(SeqCst);
        let phase = self.phase.load(Relaxed);
        // Only readers that looked at the phase long ago can still come here, so it drains.
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
