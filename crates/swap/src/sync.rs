//! The synchronisation primitives, so that loom can stand in for them.

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

/// Locks `mutex`, ignoring poison.
///
/// A panic under one of this crate's locks means that a swap entry was found wrong, and the owner
/// of the space is expected to stop the program then; until it has, the locks keep working.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Gives up the processor while waiting for another thread.
pub(crate) fn yield_now() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}
