//! Faults that wait for room.
//!
//! A fault is listed once, however often it is reported. A thread with a pending signal does not sleep
//! in a fault that the kernel takes on its behalf (for example while it writes a signal frame), but
//! faults again at once. Such a thread takes CPU time from reclaim, so its fault is served after
//! [`MAX_REPORTS`] reports.
//!
//! No fault waits for ever either. If almost all memory is unreclaimable for the moment (a forked child
//! that has yet to start its helper), reclaim may cycle the rest through the stage without gaining
//! room.

use crate::page::VirtualPage;
use crate::supervised::fault::message::Fault;
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

/// Number of reports after which a fault is served without room. More wastes CPU time on a spinning
/// thread; fewer exceeds the limit earlier.
const MAX_REPORTS: u32 = 256;
/// Longest time that a fault waits for room. Longer stalls programs while reclaim makes no progress;
/// shorter exceeds the limit earlier.
const PATIENCE: Duration = Duration::from_millis(250);

/// A fault that waits for room.
pub(crate) struct DeferredFault<S> {
    /// The address space of the fault.
    pub space: Arc<S>,
    /// The fault.
    pub fault: Fault,
    /// When it was listed.
    pub since: Instant,
}

impl<S> DeferredFault<S> {
    /// Whether the other is a report of the same fault.
    pub(crate) fn is_same(&self, other: &DeferredFault<S>) -> bool {
        let key = |fault: &Fault| (fault.page, fault.protected);
        Arc::ptr_eq(&self.space, &other.space) && key(&self.fault) == key(&other.fault)
    }
}

/// The deferred faults of a group. Handlers add faults, the reclaimer takes and serves them; the list
/// has its own lock.
pub(crate) struct Deferred<S>(Mutex<Waiting<S>>);

struct Waiting<S> {
    /// In order of arrival.
    faults: Vec<DeferredFault<S>>,
    /// For each address space (by its pointer, which a listed fault keeps valid), page and kind of
    /// fault: the index in `faults`, and the number of reports.
    index: HashMap<(usize, VirtualPage, bool), (usize, u32)>,
    /// Time at which the first fault was listed.
    since: Option<Instant>,
    /// Number of faults taken so far.
    taken: u64,
}

impl<S> Default for Waiting<S> {
    fn default() -> Self {
        Waiting {
            faults: Vec::new(),
            index: HashMap::new(),
            since: None,
            taken: 0,
        }
    }
}

impl<S> Default for Deferred<S> {
    fn default() -> Self {
        Deferred(Mutex::default())
    }
}

impl<S> Deferred<S> {
    /// Lists a fault. `false` if it was reported too often, and must be served now.
    pub(crate) fn add(&self, space: &Arc<S>, fault: Fault) -> bool {
        let mut waiting = lock(&self.0);
        let waiting = &mut *waiting;
        let key = (Arc::as_ptr(space) as usize, fault.page, fault.protected);
        match waiting.index.entry(key) {
            Entry::Occupied(mut entry) => {
                let (index, reports) = entry.get_mut();
                *reports += 1;
                // The access of another thread may be a write.
                waiting.faults[*index].fault.write |= fault.write;
                *reports < MAX_REPORTS
            }
            Entry::Vacant(entry) => {
                entry.insert((waiting.faults.len(), 1));
                let (space, since) = (space.clone(), Instant::now());
                waiting.faults.push(DeferredFault {
                    space,
                    fault,
                    since,
                });
                waiting.since.get_or_insert(since);
                true
            }
        }
    }

    /// Whether no fault waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.0).faults.is_empty()
    }

    /// Whether the first fault has waited for [`PATIENCE`].
    pub(crate) fn is_overdue(&self) -> bool {
        let since = lock(&self.0).since;
        since.is_some_and(|since| since.elapsed() >= PATIENCE)
    }

    /// Takes all faults off the list.
    pub(crate) fn take(&self) -> Vec<DeferredFault<S>> {
        let mut waiting = lock(&self.0);
        let taken = waiting.taken + waiting.faults.len() as u64;
        let next = Waiting {
            taken,
            ..Waiting::default()
        };
        std::mem::replace(&mut *waiting, next).faults
    }

    /// Numbers of faults taken so far, and of faults that came so far.
    #[cfg(simulated)]
    pub fn counts(&self) -> (u64, u64) {
        let waiting = lock(&self.0);
        (waiting.taken, waiting.taken + waiting.faults.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(page: u64, write: bool, protected: bool) -> Fault {
        Fault {
            page: VirtualPage(page),
            write,
            protected,
            unregistered: 0,
        }
    }

    #[test]
    fn a_fault_is_listed_once_and_served_when_it_is_reported_too_often() {
        let deferred = Deferred::default();
        let (one, other) = (Arc::new(1), Arc::new(2));
        assert!(deferred.add(&one, fault(7, false, false)));
        for _ in 2..MAX_REPORTS {
            assert!(deferred.add(&one, fault(7, true, false)));
        }
        assert!(deferred.add(&other, fault(7, false, false)));
        assert!(deferred.add(&one, fault(7, true, true)));
        assert!(deferred.add(&one, fault(8, false, false)));
        for _ in 0..1000 {
            assert!(!deferred.add(&one, fault(7, false, false)));
        }
        let listed = deferred.take().into_iter();
        let listed: Vec<(i32, u64, bool, bool)> = listed
            .map(|DeferredFault { space, fault, .. }| {
                (*space, fault.page.0, fault.write, fault.protected)
            })
            .collect();
        let expected = [
            (1, 7, true, false),
            (2, 7, false, false),
            (1, 7, true, true),
            (1, 8, false, false),
        ];
        assert_eq!(listed, expected);
        assert!(deferred.is_empty());
        assert!(deferred.add(&one, fault(7, false, false)), "counted anew");
    }

    #[test]
    fn none_waits_for_ever() {
        let (deferred, space) = (Deferred::default(), Arc::new(()));
        assert!(!deferred.is_overdue());
        deferred.add(&space, fault(1, false, false));
        crate::time::sleep(PATIENCE);
        deferred.add(&space, fault(2, false, false));
        assert!(deferred.is_overdue());
        assert_eq!(deferred.take().len(), 2);
        deferred.add(&space, fault(1, false, false));
        assert!(!deferred.is_overdue());
    }
}
