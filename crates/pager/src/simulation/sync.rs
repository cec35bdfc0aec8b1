//! What the core locks and waits with, where shuttle chooses which thread runs next.

use crate::page::VirtualPage;
use crate::simulation::{adversity, time};
use shuttle::rand::Rng;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::TryLockError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock};

thread_local! {
    /// Something that shuttle schedules at.
    static POINT: RefCell<Option<Rc<shuttle::sync::atomic::AtomicBool>>> = const { RefCell::new(None) };
}

/// A point at which another thread may run.
pub(crate) fn interleave() {
    let point = POINT.with_borrow_mut(|point| {
        point
            .get_or_insert_with(|| Rc::new(shuttle::sync::atomic::AtomicBool::new(false)))
            .clone()
    });
    point.load(Ordering::SeqCst);
}

/// Where a thread may be preempted for long, as it may anywhere: other threads do much meanwhile.
pub(crate) fn dawdle() {
    const LONGEST: u32 = 12;
    let mut random = shuttle::rand::thread_rng();
    interleave();
    if random.gen_range(0..4u32) == 0 {
        for _ in 0..random.gen_range(1..LONGEST) {
            time::yield_now();
        }
    }
}

/// Where a thread of memfold may be preempted for very long before it changes a page.
pub(crate) fn stall(page: Option<VirtualPage>) {
    let (looks, changes) = adversity::preempt();
    let now = || page.map(adversity::changes);
    let before = now();
    for _ in 0..looks {
        if now() >= before.map(|before| before + changes) && page.is_some() {
            return;
        }
        time::yield_now();
    }
}

/// Forgets what belongs to the last execution.
pub(crate) fn reset() {
    POINT.with_borrow_mut(Option::take);
}

/// Wakes a thread that polls for work at intervals; see the one of the host.
#[derive(Default)]
pub(crate) struct Event(AtomicBool);

impl Event {
    /// Wakes the waiting thread, or lets its next wait return at once.
    pub(crate) fn notify(&self) {
        self.0.store(true, Ordering::Relaxed);
        interleave();
    }

    /// Waits for a notification, at most `timeout`. Returns whether one came. Time passes fast: the
    /// timeout may come first whatever the other threads do.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        const LOOKS: u32 = 4;
        for _ in 0..LOOKS {
            if self.0.swap(false, Ordering::Relaxed) {
                return true;
            }
            time::sleep(timeout / LOOKS);
        }
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Locks what the model keeps, never across a point of scheduling.
///
/// # Panics
/// If it is.
#[track_caller]
pub(crate) fn lock_model<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("the model is locked across a point of scheduling"),
    }
}
