//! Faults on pages that lie on other machines: a thread waits for each, so that no handler does.
//!
//! A handler that finds such a page leaves it `Swapped` and queues the fault. One of these threads
//! serves it as any other, from the page's state on, so the page may have come back, moved or gone
//! meanwhile.

use crate::page::VirtualPage;
use crate::supervised::fault::message::Fault;
use crate::supervised::space::AddressSpace;
use crate::time::Instant;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Threads that serve such faults, each one fault at a time. More let faults on reachable servers pass
/// by more that wait for one that is not, and take more memory.
pub(crate) const THREADS: usize = 32;
/// Recalled pages that may wait in the queue. More recalls faster, and delays faults by more.
const RECALLS: usize = 256;

/// A fault, or a page to be recalled.
pub(crate) struct RemoteFault {
    /// Whose page it is.
    pub space: Arc<AddressSpace>,
    /// The fault.
    pub fault: Fault,
    /// When it was read; `None` for a recall, for which no thread waits.
    pub read: Option<Instant>,
}

/// The queue of such faults. Its lock is a leaf.
#[derive(Default)]
pub(crate) struct RemoteFaults {
    queue: Mutex<VecDeque<RemoteFault>>,
    arrived: Condvar,
}

impl RemoteFaults {
    fn queue(&self) -> MutexGuard<'_, VecDeque<RemoteFault>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a fault.
    pub(crate) fn push(&self, space: &Arc<AddressSpace>, fault: Fault) {
        self.queue().push_back(RemoteFault {
            space: space.clone(),
            fault,
            read: Some(Instant::now()),
        });
        self.arrived.notify_one();
    }

    /// Queues a page that is to come back without a fault. `false` if too many are queued.
    pub(crate) fn recall(&self, space: &Arc<AddressSpace>, page: VirtualPage) -> bool {
        let mut queue = self.queue();
        let is_it = |one: &RemoteFault| one.fault.page == page && Arc::ptr_eq(&one.space, space);
        if queue.iter().any(is_it) {
            return true;
        }
        if queue.len() >= RECALLS {
            return false;
        }
        queue.push_back(RemoteFault {
            space: space.clone(),
            fault: Fault {
                page,
                write: false,
                protected: false,
                unregistered: space.unregistered.load(Ordering::Relaxed),
            },
            read: None,
        });
        drop(queue);
        self.arrived.notify_one();
        true
    }

    /// Takes a fault, waiting for one; `None` once `is_over`, which [`RemoteFaults::stop`] has looked
    /// at again.
    pub(crate) fn pop(&self, is_over: impl Fn() -> bool) -> Option<RemoteFault> {
        let mut queue = self.queue();
        loop {
            if is_over() {
                return None;
            }
            if let Some(fault) = queue.pop_front() {
                return Some(fault);
            }
            queue = self
                .arrived
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes all threads, to find that it is over, and drops what is queued: its programs are killed.
    pub(crate) fn stop(&self) {
        self.queue().clear();
        self.arrived.notify_all();
    }
}
