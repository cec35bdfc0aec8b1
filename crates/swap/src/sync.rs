//! The synchronisation primitives, so that loom can stand in for them.

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

/// Locks `mutex`, ignoring poison.
///
/// A panic under one of these locks means that an invalid swap entry was found; the owner of the
/// space is expected to stop the program, and until then the locks keep working.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks `mutex`, ignoring poison, if it is free.
#[cfg(not(loom))]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    use std::sync::TryLockError;
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Pauses a thread that has checked `times` times before. Sleeps in the end, as a thread that only
/// yields may starve one of lower priority.
pub(crate) fn pause(times: u32) {
    #[cfg(not(loom))]
    {
        const YIELDS: u32 = 100;
        const SHORTEST_SLEEP: std::time::Duration = std::time::Duration::from_micros(50);
        match times.checked_sub(YIELDS) {
            None => std::thread::yield_now(),
            Some(sleeps) => std::thread::sleep(SHORTEST_SLEEP * (1 << sleeps.min(4))),
        }
    }
    #[cfg(loom)]
    {
        let _ = times;
        loom::thread::yield_now();
    }
}
