//! Faults on pages that lie on other machines: a thread waits for each, so that no handler does.
//!
//! A handler that finds such a page leaves it `Swapped` and queues the fault. One of these threads
//! serves it as any other, from the page's state on, so the page may have come back, moved or gone
//! meanwhile.

use crate::page::VirtualPage;
use crate::supervised::fault::message::Fault;
use crate::time::Instant;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Threads that serve such faults, each one fault at a time. More let faults on reachable servers pass
/// by more that wait for one that is not, and take more memory.
pub(crate) const THREADS: usize = 32;
/// Recalled pages that may wait in the queue. More recalls faster, and delays faults by more.
const RECALLS: usize = 256;

/// A fault, or a page to be recalled.
pub(crate) struct RemoteFault<S> {
    /// Whose page it is.
    pub space: Arc<S>,
    /// The fault.
    pub fault: Fault,
    /// When it was first read; `None` for a recall, for which no thread waits.
    pub read: Option<Instant>,
}

/// A page: the pointer of its address space, which a listed fault keeps valid, and where it is there.
type Key = (usize, VirtualPage);

fn key<S>(space: &Arc<S>, page: VirtualPage) -> Key {
    (Arc::as_ptr(space).addr(), page)
}

/// The queue of such faults. Its lock is a leaf.
///
/// A page is listed once, however often it is reported: a waiting thread that takes a signal faults again. The list stays
/// as short as there are threads, and pages recalled.
pub(crate) struct RemoteFaults<S> {
    queue: Mutex<Waiting<S>>,
    arrived: Condvar,
}

struct Waiting<S> {
    /// In order of arrival.
    order: VecDeque<Key>,
    /// What is in `order`.
    listed: HashMap<Key, RemoteFault<S>>,
}

impl<S> Default for RemoteFaults<S> {
    fn default() -> Self {
        RemoteFaults {
            queue: Mutex::new(Waiting {
                order: VecDeque::new(),
                listed: HashMap::new(),
            }),
            arrived: Condvar::new(),
        }
    }
}

impl<S> Waiting<S> {
    fn pop(&mut self) -> Option<RemoteFault<S>> {
        let key = self.order.pop_front()?;
        self.listed.remove(&key)
    }
}

impl<S> RemoteFaults<S> {
    fn waiting(&self) -> MutexGuard<'_, Waiting<S>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a fault. A page that is queued for a recall keeps its place.
    pub(crate) fn push(&self, space: &Arc<S>, fault: Fault) {
        let now = Instant::now();
        let mut waiting = self.waiting();
        let waiting = &mut *waiting;
        match waiting.listed.entry(key(space, fault.page)) {
            Entry::Occupied(mut entry) => {
                let listed = entry.get_mut();
                // The other access may be a write, and was read before the last unregistering if it did not wait.
                listed.fault = Fault {
                    write: listed.fault.write || fault.write,
                    ..fault
                };
                listed.read.get_or_insert(now);
            }
            Entry::Vacant(entry) => {
                waiting.order.push_back(*entry.key());
                entry.insert(RemoteFault {
                    space: space.clone(),
                    fault,
                    read: Some(now),
                });
                self.arrived.notify_one();
            }
        }
    }

    /// Queues a page that is to come back without a fault. `false` if too many are queued.
    pub(crate) fn recall(&self, space: &Arc<S>, fault: Fault) -> bool {
        let mut waiting = self.waiting();
        let waiting = &mut *waiting;
        match waiting.listed.entry(key(space, fault.page)) {
            Entry::Occupied(_) => true,
            Entry::Vacant(_) if waiting.order.len() >= RECALLS => false,
            Entry::Vacant(entry) => {
                waiting.order.push_back(*entry.key());
                entry.insert(RemoteFault {
                    space: space.clone(),
                    fault,
                    read: None,
                });
                self.arrived.notify_one();
                true
            }
        }
    }

    /// Takes a fault, waiting for one; `None` once `is_over`, which [`RemoteFaults::stop`] has looked
    /// at again.
    pub(crate) fn pop(&self, is_over: impl Fn() -> bool) -> Option<RemoteFault<S>> {
        let mut waiting = self.waiting();
        loop {
            if is_over() {
                return None;
            }
            if let Some(fault) = waiting.pop() {
                return Some(fault);
            }
            waiting = self
                .arrived
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes all threads, to find that it is over, and drops what is queued: its programs are killed.
    pub(crate) fn stop(&self) {
        let mut waiting = self.waiting();
        waiting.order.clear();
        waiting.listed.clear();
        drop(waiting);
        self.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(page: u64, write: bool) -> Fault {
        Fault {
            page: VirtualPage(page),
            write,
            protected: false,
            unregistered: 0,
        }
    }

    fn length(faults: &RemoteFaults<u32>) -> usize {
        let waiting = faults.waiting();
        assert_eq!(waiting.order.len(), waiting.listed.len());
        waiting.order.len()
    }

    #[test]
    fn a_page_is_listed_once_however_often_it_is_reported() {
        let (faults, space) = (RemoteFaults::default(), Arc::new(1));
        for _ in 0..1000 {
            faults.push(&space, fault(5, false));
        }
        assert_eq!(length(&faults), 1);
        // Those that follow are not refused.
        assert!(faults.recall(&space, fault(6, false)));
        faults.push(&Arc::new(1), fault(5, false));
        assert_eq!(length(&faults), 3, "another address space has its own");
        let taken = faults.pop(|| false).expect("a fault");
        assert_eq!(taken.fault.page, VirtualPage(5));
        faults.push(&space, fault(5, false));
        assert_eq!(length(&faults), 3, "it is listed again");
    }

    #[test]
    fn a_fault_on_a_recalled_page_is_a_fault() {
        let (faults, space) = (RemoteFaults::default(), Arc::new(1));
        assert!(faults.recall(&space, fault(5, false)));
        faults.push(&space, fault(5, true));
        assert!(faults.recall(&space, fault(5, false)));
        faults.push(&space, fault(5, false));
        let taken = faults.pop(|| false).expect("a fault");
        assert!(taken.fault.write && taken.read.is_some());
        assert_eq!(length(&faults), 0);
    }

    #[test]
    fn recalls_leave_room_for_faults() {
        let (faults, space) = (RemoteFaults::default(), Arc::new(1));
        for page in 0..RECALLS as u64 {
            assert!(faults.recall(&space, fault(page, false)));
        }
        assert!(!faults.recall(&space, fault(999, false)));
        faults.push(&space, fault(999, false));
        assert!(faults.recall(&space, fault(999, false)), "it is listed");
    }
}
