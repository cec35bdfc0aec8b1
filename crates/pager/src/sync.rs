//! Mutexes without poisoning, and an event that wakes one thread. The simulation schedules its threads at
//! these.

#[cfg(simulated)]
pub(crate) use crate::simulation::sync::{Event, Mutex, MutexGuard, RwLock, interleave};
#[cfg(not(simulated))]
pub(crate) use std::sync::{Mutex, MutexGuard, RwLock};
#[cfg(not(simulated))]
use std::{sync::Condvar, time::Duration};

/// Locks a mutex and ignores poisoning.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The supervisor aborts on panic. In a program that embeds the engine and goes on, a poisoned mutex
    // guards usable data: each critical section makes its change at once.
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A point at which the simulation may switch to another thread: before each look at a state that
/// another thread changes without a lock.
#[cfg(not(simulated))]
#[inline(always)]
pub(crate) fn interleave() {}

/// Wakes a thread that polls for work at intervals. Any thread notifies, one thread waits; a
/// notification stays pending until then.
#[cfg(not(simulated))]
#[derive(Default)]
pub(crate) struct Event {
    notified: Mutex<bool>,
    changed: Condvar,
}

#[cfg(not(simulated))]
impl Event {
    /// Wakes the waiting thread, or lets its next wait return at once.
    pub(crate) fn notify(&self) {
        let mut notified = lock(&self.notified);
        if !*notified {
            *notified = true;
            self.changed.notify_one();
        }
    }

    /// Waits for a notification, at most `timeout`. Returns whether one came.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let notified = lock(&self.notified);
        let (mut notified, _) = self
            .changed
            .wait_timeout_while(notified, timeout, |notified| !*notified)
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        std::mem::take(&mut *notified)
    }
}
