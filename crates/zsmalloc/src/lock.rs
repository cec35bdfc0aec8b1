//! The lock of a bin, which every store and free takes.
//!
//! It is nearly always uncontended: threads store into their own shard's bins and hold a lock for
//! tens of nanoseconds, in bulk for some microseconds, and never while they take another. So the
//! uncontended cost counts. A mutex with sleeping waiters must check for them on release, which
//! takes a second locked instruction. Here the release is a plain store, and waiters poll: they
//! spin, then yield, then sleep for increasing times, so that a preempted holder gets a CPU
//! whatever its priority.

use std::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    panic::{RefUnwindSafe, UnwindSafe},
};

use crate::sync::atomic::{AtomicBool, Ordering};

/// A value that one thread at a time uses.
#[derive(Debug, Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `held` lets one thread at a time have the value, as if it were sent from one to the next.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Access to the value, until it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a, T> {
    lock: &'a Lock<T>,
    /// Shared by threads only if the value may be.
    value: PhantomData<&'a mut T>,
}

impl<'a, T> Held<'a, T> {
    /// The guard of a lock that this thread has just taken.
    #[inline]
    fn of(lock: &'a Lock<T>) -> Self {
        Held {
            lock,
            value: PhantomData,
        }
    }
}

// Code under a lock of this crate neither calls out nor panics half way, so the value is consistent
// after a panic.
impl<T> RefUnwindSafe for Lock<T> {}
impl<T> UnwindSafe for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock, waiting for its holder.
    #[inline]
    pub(crate) fn lock(&self) -> Held<'_, T> {
        if !self.take() {
            self.wait();
        }
        Held::of(self)
    }

    /// Takes the lock if it is free.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Held<'_, T>> {
        self.take().then(|| Held::of(self))
    }

    /// Acquire: what the last holder did happened before.
    #[inline]
    fn take(&self) -> bool {
        self.held
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    #[cold]
    fn wait(&self) {
        let mut times = 0;
        loop {
            crate::sync::pause(times);
            times = times.saturating_add(1);
            // Load first: a compare-and-swap would take the cache line from the holder.
            if !self.held.load(Ordering::Relaxed) && self.take() {
                return;
            }
        }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock until the guard is dropped.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock until the guard is dropped.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: changes of the value happen before the next holder's accesses.
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_thread_holds_the_lock_and_others_are_refused() {
        let counts = Lock::new((0, 0));
        // More threads than CPUs: holders are preempted, and waiters sleep.
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let mut held = counts.lock();
                        held.0 += 1;
                        assert!(counts.try_lock().is_none());
                        held.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*counts.lock(), (32_000, 32_000));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    type Shared = Lock<UnsafeCell<usize>>;

    /// Raises a count on this thread with a lock that waits, and on another with `other`, which
    /// returns whether it did. Loom's cell panics if both access it at once, or one does not see
    /// the other's write.
    fn model(other: fn(&Shared) -> bool) {
        loom::model(move || {
            let shared = Arc::new(Lock::new(UnsafeCell::new(0)));
            let thread = {
                let shared = shared.clone();
                thread::spawn(move || other(&shared))
            };
            raise(shared.lock());
            let raised = 1 + usize::from(thread.join().unwrap());
            // SAFETY: the lock is held: this is what is tested.
            let count = shared.lock().with(|count| unsafe { *count });
            assert_eq!(count, raised);
        });
    }

    fn raise(held: Held<'_, UnsafeCell<usize>>) -> bool {
        // SAFETY: as above.
        held.with_mut(|count| unsafe { *count += 1 });
        true
    }

    #[test]
    fn one_thread_at_a_time_sees_what_the_last_one_wrote() {
        model(|shared| raise(shared.lock()));
    }

    #[test]
    fn try_lock_does_not_disturb_the_holder() {
        model(|shared| {
            let held = shared.try_lock().or_else(|| shared.try_lock());
            held.is_some_and(raise)
        });
    }
}
