//! Faults that wait until there is room.
//!
//! Each is listed once, however often it is told. A thread with a signal pending does not sleep when
//! the kernel itself faults for it (as it writes the frame of the signal before, say): it asks again
//! at once, for as long as it gets no answer. Such questions come faster than they can be answered
//! one by one, and who asks takes the processor from those who make room: it is let in after a few.
//!
//! None waits for ever, either. Memory that cannot be moved out for the moment (that of a forked
//! child which has yet to start its helper) may be all there is but a little that comes back from the
//! stage as often as it is moved there: reclaim works and gains nothing.

use crate::page::VirtualPage;
use crate::supervised::fault::message::Fault;
use crate::sync::lock;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A fault that was told so many times is let in.
const TOLD_MOST: u32 = 256;
/// How long a fault waits at most. Where room can be made, that takes a few milliseconds.
const PATIENCE: Duration = Duration::from_millis(250);

/// A fault that waits until there is room for its page.
pub struct DeferredFault<S> {
    pub space: Arc<S>,
    pub fault: Fault,
}

/// All that wait in a group. For any thread.
pub struct Deferred<S>(Mutex<Waiting<S>>);

struct Waiting<S> {
    /// In the order in which they came.
    faults: Vec<DeferredFault<S>>,
    /// By address space (where it is in memory is its own while it is listed), page and kind: the index,
    /// and how often it was told.
    told: HashMap<(usize, VirtualPage, bool), (usize, u32)>,
    /// When the first was listed.
    since: Option<Instant>,
}

impl<S> Default for Waiting<S> {
    fn default() -> Self {
        Waiting {
            faults: Vec::new(),
            told: HashMap::new(),
            since: None,
        }
    }
}

impl<S> Default for Deferred<S> {
    fn default() -> Self {
        Deferred(Mutex::default())
    }
}

impl<S> Deferred<S> {
    /// Lists a fault. `false` if it is not to wait any more.
    pub fn add(&self, space: &Arc<S>, fault: Fault) -> bool {
        let mut waiting = lock(&self.0);
        let waiting = &mut *waiting;
        let key = (Arc::as_ptr(space) as usize, fault.page, fault.protected);
        match waiting.told.entry(key) {
            Entry::Occupied(mut entry) => {
                let (index, times) = entry.get_mut();
                *times += 1;
                // Another thread's may be a write.
                waiting.faults[*index].fault.write |= fault.write;
                *times < TOLD_MOST
            }
            Entry::Vacant(entry) => {
                entry.insert((waiting.faults.len(), 1));
                let space = space.clone();
                waiting.faults.push(DeferredFault { space, fault });
                waiting.since.get_or_insert_with(Instant::now);
                true
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.0).faults.is_empty()
    }

    /// Whether the first has waited for as long as any may.
    pub fn is_impatient(&self) -> bool {
        let since = lock(&self.0).since;
        since.is_some_and(|since| since.elapsed() >= PATIENCE)
    }

    /// Takes them all off the list.
    pub fn take(&self) -> Vec<DeferredFault<S>> {
        std::mem::take(&mut *lock(&self.0)).faults
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
    fn a_fault_is_listed_once_and_let_in_when_it_was_told_too_often() {
        let deferred = Deferred::default();
        let (one, other) = (Arc::new(1), Arc::new(2));
        assert!(deferred.add(&one, fault(7, false, false)));
        for _ in 2..TOLD_MOST {
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
            .map(|DeferredFault { space, fault }| {
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
        assert!(deferred.add(&one, fault(7, false, false)), "told anew");
    }

    #[test]
    fn none_waits_for_ever() {
        let (deferred, space) = (Deferred::default(), Arc::new(()));
        assert!(!deferred.is_impatient());
        deferred.add(&space, fault(1, false, false));
        std::thread::sleep(PATIENCE);
        deferred.add(&space, fault(2, false, false));
        assert!(deferred.is_impatient());
        assert_eq!(deferred.take().len(), 2);
        deferred.add(&space, fault(1, false, false));
        assert!(!deferred.is_impatient());
    }
}
