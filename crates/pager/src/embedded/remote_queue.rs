//! Pages on other machines: the faults that wait for them.
//!
//! To load such a page takes a network, which no signal handler may wait for. So a fault on one is queued,
//! and the faulting thread repeats its access until a thread of the engine has brought the page in.

use super::area::{Area, Served};
use super::event::Event;
use super::streams::Advice;
use crate::sync::lock;
use memfold_swap::{RemoteTier, RemoteUsage};
use memfold_sys::PAGE_SIZE;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Threads that bring pages in. More let more threads of the program wait at the same time, and take more
/// memory.
pub(super) const THREADS: usize = 8;
/// Faults that wait for one of them, at most; others are repeated.
const WAITING: usize = 64;
/// Between two attempts of a thread whose page is on its way. A longer pause costs less, and adds to the
/// time that a fault takes.
pub(super) const PAUSE: Duration = Duration::from_micros(50);

/// A store on other machines, and what must live as long as pages may be there.
#[derive(Debug, Clone)]
pub struct Remote {
    /// The tier.
    pub tier: Arc<RemoteTier>,
    /// Its owner, dropped after the last region and the engine.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// One thread's queue.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiting: Mutex<VecDeque<(Arc<Area>, Advice)>>,
    pub(super) event: Event,
}

/// What an engine with a store has.
pub(crate) struct RemoteFaults {
    pub(super) queues: [Queue; THREADS],
    /// Threads that have taken a queue.
    pub(super) taken: AtomicU32,
    /// Set when the pool has pages to send.
    pub(super) to_send: Event,
    /// Whether the store took pages when it was last asked to.
    pub(super) takes_pages: AtomicBool,
    store: Remote,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl RemoteFaults {
    pub(crate) fn new(store: Remote) -> RemoteFaults {
        let queues: [Queue; THREADS] = Default::default();
        for queue in &queues {
            // A signal handler must not allocate.
            lock(&queue.waiting).reserve(WAITING);
        }
        RemoteFaults {
            queues,
            taken: AtomicU32::new(0),
            to_send: Event::default(),
            takes_pages: AtomicBool::new(true),
            store,
        }
    }

    /// Queues a fault on a page of the store, with the span that is to be brought in, unless it waits
    /// already.
    pub(crate) fn ask(
        &self,
        area: &Arc<Area>,
        start: usize,
        span: impl FnOnce() -> Advice,
    ) -> Served {
        // The same page always waits for the same thread.
        let queue = &self.queues[start / PAGE_SIZE % THREADS];
        let mut waiting = lock(&queue.waiting);
        let is_same = |one: &(Arc<Area>, Advice)| one.1.address == start as i64;
        if !waiting.iter().any(is_same) {
            if waiting.len() == WAITING {
                return Served::Busy;
            }
            waiting.push_back((area.clone(), span()));
        }
        drop(waiting);
        queue.event.set();
        Served::Asked
    }

    /// Has all threads look whether the engine stops.
    pub(crate) fn stop(&self) {
        for queue in &self.queues {
            queue.event.set();
        }
        self.to_send.set();
    }

    pub(crate) fn usage(&self) -> RemoteUsage {
        self.store.tier.usage()
    }
}
