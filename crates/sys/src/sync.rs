//! The words that the gate consists of and its threads sleep on, so that loom can stand in for the CPU and the kernel; and
//! locks without poison.

#[cfg(not(loom))]
pub(crate) use crate::futex::{wait, wake_all};
#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU32;

#[cfg(loom)]
pub(crate) use modelled::{AtomicU32, wait, wake_all};

/// Locks `mutex`, ignoring poison.
#[cfg(feature = "std")]
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(loom)]
mod modelled {
    use crate::Errno;
    use core::sync::atomic::Ordering::{self, SeqCst};
    use loom::sync::atomic::{self, fence};
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    /// A word with the threads that sleep on it.
    #[derive(Debug)]
    pub(crate) struct AtomicU32 {
        word: atomic::AtomicU32,
        sleepers: Mutex<()>,
        woken: Condvar,
    }

    /// Loom takes `SeqCst` for `AcqRel`, but knows fences. (One before a load, too, would hide a change that lacks it.)
    fn ordered<R>(ordering: Ordering, change: impl FnOnce() -> R) -> R {
        let result = change();
        if ordering == SeqCst {
            fence(SeqCst);
        }
        result
    }

    impl AtomicU32 {
        pub(crate) fn new(value: u32) -> AtomicU32 {
            AtomicU32 {
                word: atomic::AtomicU32::new(value),
                sleepers: Mutex::new(()),
                woken: Condvar::new(),
            }
        }

        pub(crate) fn load(&self, ordering: Ordering) -> u32 {
            self.word.load(ordering)
        }

        pub(crate) fn fetch_add(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, || self.word.fetch_add(value, ordering))
        }

        pub(crate) fn fetch_sub(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, || self.word.fetch_sub(value, ordering))
        }

        pub(crate) fn fetch_and(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, || self.word.fetch_and(value, ordering))
        }

        pub(crate) fn fetch_or(&self, value: u32, ordering: Ordering) -> u32 {
            ordered(ordering, || self.word.fetch_or(value, ordering))
        }

        pub(crate) fn compare_exchange(
            &self,
            current: u32,
            new: u32,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u32, u32> {
            ordered(success, || {
                self.word.compare_exchange(current, new, success, failure)
            })
        }

        pub(crate) fn compare_exchange_weak(
            &self,
            current: u32,
            new: u32,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u32, u32> {
            self.compare_exchange(current, new, success, failure)
        }
    }

    /// A timeout of 0 expires at once, any other never: a thread that is not woken is a deadlock.
    pub(crate) fn wait(
        word: &AtomicU32,
        expected: u32,
        timeout_ns: Option<u64>,
    ) -> Result<(), Errno> {
        let sleepers = word.sleepers.lock().expect("no thread panics");
        if word.load(SeqCst) != expected {
            return Err(Errno::EAGAIN);
        }
        if timeout_ns == Some(0) {
            drop(sleepers);
            thread::yield_now();
            return Err(Errno::ETIMEDOUT);
        }
        drop(word.woken.wait(sleepers).expect("no thread panics"));
        Ok(())
    }

    pub(crate) fn wake_all(word: &AtomicU32) {
        let sleepers = word.sleepers.lock().expect("no thread panics");
        word.woken.notify_all();
        drop(sleepers);
    }
}
