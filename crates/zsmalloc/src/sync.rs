//! The synchronisation primitives, so that loom can stand in for them.

#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, TryLockError, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(loom)]
pub(crate) use std::sync::TryLockError;

/// Locks `mutex`, ignoring poison.
///
/// No code of this crate that runs under a lock calls out or panics half way through a change, so
/// a poisoned lock still guards a consistent state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks `mutex` if it is free.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Yields the CPU while waiting for another thread.
pub(crate) fn yield_now() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// A full fence after a read-modify-write: later loads are ordered after it.
///
/// On x86-64 that instruction is a full fence itself, and another would double the cost of a read;
/// elsewhere the memory model needs an explicit fence.
#[inline]
pub(crate) fn full_fence_after_rmw() {
    if cfg!(all(target_arch = "x86_64", not(loom), not(miri))) {
        std::sync::atomic::compiler_fence(atomic::Ordering::SeqCst);
    } else {
        atomic::fence(atomic::Ordering::SeqCst);
    }
}

/// Parking threads.
pub(crate) mod thread {
    #[cfg(not(loom))]
    pub(crate) use std::thread::{Thread, current, park_timeout};

    #[cfg(loom)]
    pub(crate) use loom::thread::{Thread, current};

    /// Loom has no time: only a wake-up ends this sleep.
    #[cfg(loom)]
    pub(crate) fn park_timeout(_: std::time::Duration) {
        loom::thread::park();
    }
}

/// A waiting thread spins `SPINS` times, yields `YIELDS` times, then sleeps, for up to 16 times the
/// shortest sleep.
#[cfg(not(loom))]
const SPINS: u32 = 100;
#[cfg(not(loom))]
const YIELDS: u32 = 20;
#[cfg(not(loom))]
const SHORTEST_SLEEP: std::time::Duration = std::time::Duration::from_micros(50);

/// Pauses a thread that has checked `times` times before.
#[cold]
pub(crate) fn pause(times: u32) {
    #[cfg(not(loom))]
    match times.checked_sub(SPINS) {
        None => std::hint::spin_loop(),
        Some(yields) => match yields.checked_sub(YIELDS) {
            None => yield_now(),
            Some(sleeps) => std::thread::sleep(SHORTEST_SLEEP * (1 << sleeps.min(4))),
        },
    }
    #[cfg(loom)]
    {
        let _ = times;
        yield_now();
    }
}
