//! `madvise` events of an address space, and which of them are over.
//!
//! The kernel drops the pages after the event was read, and does not say when it is done. The pages stay
//! `Removed` until then: paged out before, a page would come back with its old contents. So the governor
//! watches the threads. The event was read, so that the thread which dropped the pages waits for nothing but
//! `mmap_lock` until it is done. A thread is past it that
//! - sleeps interruptibly, is stopped, or has ended: nothing in that part of the kernel sleeps so;
//! - has run for more than 10 ms since. It waited for its event without running, and takes the lock within
//!   microseconds. It may hold it for longer than that, so the governor takes `mmap_lock` once, exclusively.
//!
//! What is not over by that within [`REMOVED_GRACE`](crate::page_state) seconds is taken to be.

use crate::bugs::Bug;
use crate::page::VirtualPage;
use crate::page_state::Removal;
use crate::supervised::events::recent_remove::RecentRemovals;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::{AddressSpace, Attached};
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_sys::process::ThreadSample;
use std::sync::atomic::{AtomicU32, Ordering};

/// Least milliseconds between two looks at the threads. More keeps rewritten pages resident for longer.
const INTERVAL: u64 = 2;
/// Least time between two looks, in times of what the last one took. More bounds the governor's share of a
/// CPU at programs with many threads.
const REST: u64 = 30;
/// Clock ticks of CPU time that show a thread to have run for one whole tick, 10 ms: both parts of the sum
/// are rounded down.
const TICKS_RUN: u64 = 3;
/// Events that are not over from which on numbers, which wrap, do not tell which are.
const MOST_PENDING: u32 = 1 << 22;

/// `madvise` events (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`) of one program.
#[derive(Default)]
pub(crate) struct Removals {
    /// Number of events.
    pub count: AtomicU32,
    /// Number of events, from the first on, whose pages the kernel has dropped. Stored with Release once the
    /// kernel showed it; a thread that reads it with Acquire looks at the pages afterwards.
    over: AtomicU32,
    /// Recent events on ranges that were not managed.
    pub unmanaged: Mutex<RecentRemovals>,
    /// Used by the governor alone.
    watch: Mutex<Watch>,
}

/// Waiting for the threads that may be dropping pages.
#[derive(Default)]
struct Watch {
    /// The number of events that it is about; none if no watch is on.
    events: Option<u32>,
    /// The threads that were not seen to be past them.
    unsettled: Vec<ThreadSample>,
    /// The earliest next look, in milliseconds since the supervisor's start.
    next: u64,
}

impl Removals {
    /// Whether the kernel has dropped the pages of an event.
    pub(crate) fn is_over(&self, removal: Removal, now: u32) -> bool {
        let over = self.over.load(Ordering::Acquire);
        let pending = self.count.load(Ordering::Relaxed).wrapping_sub(over);
        removal.is_old(now) || (pending < MOST_PENDING && removal.is_before(over))
    }
}

impl Watch {
    /// Takes a look into account. Returns the number of events that are over, once the threads are past them.
    fn look(&mut self, events: u32, threads: &[ThreadSample]) -> Option<u32> {
        if self.events.is_none() {
            self.events = Some(events);
            self.unsettled = threads.to_vec();
            self.unsettled.retain(|thread| !thread.is_interruptible);
        } else {
            self.unsettled
                .retain(|before| threads.iter().any(|thread| may_be_dropping(before, thread)));
        }
        if self.unsettled.is_empty() || Bug::DropsTakenForOver.is_back() {
            return self.events.take();
        }
        None
    }
}

/// Whether `now` is the thread that was `before`, and not past what it did then.
fn may_be_dropping(before: &ThreadSample, now: &ThreadSample) -> bool {
    let is_same = (before.id, before.started) == (now.id, now.started);
    is_same && !now.is_interruptible && now.cpu_ticks.saturating_sub(before.cpu_ticks) < TICKS_RUN
}

impl AddressSpace {
    /// Looks whether `madvise` events are over. Called by the governor.
    pub(crate) fn watch_removals(&self) {
        // All of these were read: a thread that drops pages of one goes on without the supervisor.
        let events = self.removed.count.load(Ordering::Acquire);
        let Some(attached) = self.attached() else {
            return;
        };
        if events == self.removed.over.load(Ordering::Relaxed) || self.is_dead() {
            return;
        }
        let mut watch = lock(&self.removed.watch);
        let now = self.resources.milliseconds();
        if now < watch.next {
            return;
        }
        let began = Instant::now();
        let over = self.look_at_threads(&mut watch, events, attached);
        if let Some(over) = over {
            self.removed.over.store(over, Ordering::Release);
        }
        let rest = began.elapsed().as_millis() as u64 * REST;
        watch.next = now + rest.max(INTERVAL);
    }

    fn look_at_threads(&self, watch: &mut Watch, events: u32, attached: &Attached) -> Option<u32> {
        // Tried again if threads come and go.
        let threads = attached.inspector.threads().ok()?;
        let over = watch.look(events, &threads)?;
        let is_shared = attached.inspector.shares_memory().unwrap_or(true);
        // The arena ends with a guard page.
        let guard = VirtualPage(attached.arena.whole.end.0 - 1);
        (!is_shared && self.uffd().await_mmap_lock(guard).is_ok()).then_some(over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(id: i32, is_interruptible: bool, cpu_ticks: u64) -> ThreadSample {
        ThreadSample {
            id,
            started: 7,
            is_interruptible,
            cpu_ticks,
        }
    }

    #[test]
    fn events_are_over_when_each_thread_is_past_them() {
        let mut watch = Watch::default();
        let at_first = [thread(1, true, 5), thread(2, false, 5), thread(3, false, 5)];
        assert_eq!(watch.look(9, &at_first), None);
        // Later events are for another watch, and new threads did not drop what was before.
        let busy = [
            thread(2, false, 7),
            thread(3, false, 8),
            thread(4, false, 0),
        ];
        assert_eq!(watch.look(12, &busy), None, "2 ran too little");
        let another = ThreadSample {
            started: 8,
            ..thread(2, false, 5)
        };
        assert_eq!(watch.look(12, &[another]), Some(9));
        assert_eq!(watch.look(12, &[thread(2, true, 0)]), Some(12), "at once");
    }

    #[test]
    fn numbers_tell_events_that_are_over() {
        let removals = Removals::default();
        let one = |count| Removal::new(100, count);
        assert!(!removals.is_over(one(0), 100));
        assert!(removals.is_over(one(0), 111), "by its age");
        removals.count.store(8, Ordering::Relaxed);
        removals.over.store(5, Ordering::Relaxed);
        assert!(removals.is_over(one(4), 100));
        assert!(!removals.is_over(one(5), 100));
        let wrapped = u32::MAX - 1;
        removals.over.store(wrapped, Ordering::Relaxed);
        removals.count.store(3, Ordering::Relaxed);
        assert!(removals.is_over(one(wrapped - 1), 100));
        assert!(!removals.is_over(one(wrapped), 100) && !removals.is_over(one(1), 100));
        removals
            .count
            .store(wrapped.wrapping_add(MOST_PENDING), Ordering::Relaxed);
        assert!(!removals.is_over(one(wrapped - 1), 100), "too many");
    }
}
