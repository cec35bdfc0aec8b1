//! Locks without poison: a thread panics only where the swap space finds a bug, which it reports, and the others go on.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, ignoring poison.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// What a lock or a wait has returned, ignoring poison.
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
