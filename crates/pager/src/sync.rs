//! Locking and waking, shared by all threads of the supervisor.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Locks a mutex.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic anywhere ends the supervisor (panic = "abort"); tests may poison and go on.
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Wakes a thread that otherwise looks for work at intervals. A notification is kept until the thread
/// waits.
#[derive(Default)]
pub struct Event {
    notified: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    pub fn notify(&self) {
        let mut notified = lock(&self.notified);
        if !*notified {
            *notified = true;
            self.changed.notify_one();
        }
    }

    /// Waits for a notification, at most `timeout`; returns whether there was one.
    pub fn wait(&self, timeout: Duration) -> bool {
        let notified = lock(&self.notified);
        let (mut notified, _) = self
            .changed
            .wait_timeout_while(notified, timeout, |notified| !*notified)
            .unwrap_or_else(|poison| poison.into_inner());
        std::mem::take(&mut *notified)
    }
}
