//! Gather: background release of the slots of an unmap, an exit or a trim.
//!
//! The unmapping thread queues ranges of slots and continues. Workers release them, more with a
//! longer backlog, up to a limit; they exit soon after the queue is empty, so an idle gather costs
//! nothing. A few slots are released by the caller at once, which is cheaper than queuing them, and
//! so is everything beyond the limit of the backlog. A thread that needs memory can
//! [help](Gather::help).
//!
//! (Batched release off the exit path is an idea from Z. Song's series of April 2026 for phones.)

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use zsmalloc::PageSource;

use crate::{
    backlog::Backlog,
    slot::SlotRanges,
    space::SwapSpace,
    sync::{
        atomic::{AtomicU64, Ordering::Relaxed},
        lock,
    },
};

/// Slots that a worker takes from the queue at a time.
const CHUNK: u32 = 4096;

/// How long a worker waits for more work before it exits.
const LINGER: Duration = Duration::from_secs(1);

/// The configuration of a gather.
#[derive(Debug, Clone)]
pub struct GatherConfig {
    /// Fewer slots than this are released by the caller.
    pub threshold: u64,
    /// The most workers at a time: the CPUs to spare. 0: callers release everything themselves.
    pub max_workers: usize,
    /// Slots of backlog for each worker. A larger value starts fewer workers.
    pub slots_per_worker: u64,
    /// The most queued slots; the caller releases what is beyond.
    pub max_backlog: u64,
}

impl Default for GatherConfig {
    fn default() -> Self {
        Self {
            threshold: 512,
            max_workers: 1,
            slots_per_worker: 1 << 16,
            max_backlog: 1 << 22,
        }
    }
}

/// Statistics of a gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GatherUsage {
    /// Slots that are queued or being released.
    pub backlog_slots: u64,
    /// Running workers.
    pub workers: usize,
    /// Slots released so far by workers and helpers.
    pub released_by_others: u64,
    /// Slots released so far by the threads that brought them.
    pub released_at_once: u64,
}

struct Inner<S: PageSource> {
    space: Arc<SwapSpace<S>>,
    config: GatherConfig,
    /// Called by each worker first.
    on_start: Box<dyn Fn() + Send + Sync>,
    backlog: Mutex<Backlog>,
    /// Signalled when slots are queued.
    wake: Condvar,
    /// Signalled when nothing is left.
    quiet: Condvar,
    released_by_others: AtomicU64,
    released_at_once: AtomicU64,
}

/// Releases slots in the background. Dropping it finishes what is left.
///
/// ```
/// use std::sync::Arc;
/// use memfold_swap::{Gather, GatherConfig, SlotRanges};
/// # use memfold_swap::{PAGE_SIZE, Scratch, SwapConfig, SwapSpace};
/// # let config = SwapConfig { pool_capacity_pages: 4096, max_slots: 4096, ..Default::default() };
/// # let space = SwapSpace::new(zsmalloc::HeapSource::new(), config)?;
/// # let mut scratch = Scratch::new();
/// let space = Arc::new(space);
/// let gather = Gather::new(Arc::clone(&space), GatherConfig::default());
/// let mut slots = SlotRanges::new();
/// for number in 0..1000_u32 {
///     slots.push(space.store(&[number as u8; PAGE_SIZE], &mut scratch)?);
/// }
/// gather.release(slots);
/// gather.flush();
/// assert_eq!(space.usage().stored_pages, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Gather<S: PageSource + 'static>(Arc<Inner<S>>);

impl<S: PageSource + 'static> Gather<S> {
    /// A gather that releases slots of `space`.
    pub fn new(space: Arc<SwapSpace<S>>, config: GatherConfig) -> Self {
        Self::with_worker_start(space, config, || {})
    }

    /// Like [`new`](Self::new), with a function that each worker calls first: to set its priority
    /// and CPU affinity, say, which it inherits from the thread that queues slots.
    pub fn with_worker_start(
        space: Arc<SwapSpace<S>>,
        config: GatherConfig,
        on_start: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            space,
            config,
            on_start: Box::new(on_start),
            backlog: Mutex::default(),
            wake: Condvar::new(),
            quiet: Condvar::new(),
            released_by_others: AtomicU64::new(0),
            released_at_once: AtomicU64::new(0),
        }))
    }

    /// Takes the caller's counts of all `slots`, to drop them soon.
    ///
    /// # Panics
    ///
    /// If they are dropped at once and one of the slots holds no page. Otherwise a worker panics.
    pub fn release(&self, slots: SlotRanges) {
        let shared = &self.0;
        let count = slots.slots();
        if count < shared.config.threshold || !self.hand_over(&slots) {
            shared.released_at_once.fetch_add(count, Relaxed);
            shared.space.release_ranges(slots.as_slice());
        }
    }

    /// Queues slots if there is room and a worker to release them.
    fn hand_over(&self, slots: &SlotRanges) -> bool {
        let mut backlog = lock(&self.0.backlog);
        let count = backlog.slots() + slots.slots();
        if count > self.0.config.max_backlog || !backlog.make_room(slots.as_slice().len()) {
            return false;
        }
        let wanted = count.div_ceil(self.0.config.slots_per_worker.max(1));
        let wanted = (wanted as usize).min(self.0.config.max_workers);
        while backlog.workers() < wanted && self.start_worker() {
            backlog.worker_came();
        }
        if backlog.workers() == 0 {
            return false;
        }
        backlog.add(slots);
        self.0.wake.notify_all();
        true
    }

    fn start_worker(&self) -> bool {
        let worker = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("memfold-gather".to_owned());
        thread.spawn(move || worker.work()).is_ok()
    }

    /// Releases about `slots` queued slots in this thread, which needs memory now. Returns their
    /// number.
    pub fn help(&self, slots: u64) -> u64 {
        let mut released = 0;
        while released < slots {
            match self.0.release_chunk() {
                0 => break,
                count => released += count,
            }
        }
        released
    }

    /// Waits until everything queued before the call is released, and helps with it.
    pub fn flush(&self) {
        self.help(u64::MAX);
        let mut backlog = lock(&self.0.backlog);
        while backlog.slots() > 0 {
            backlog = self
                .0
                .quiet
                .wait(backlog)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// Statistics of the gather.
    pub fn usage(&self) -> GatherUsage {
        let backlog = lock(&self.0.backlog);
        GatherUsage {
            backlog_slots: backlog.slots(),
            workers: backlog.workers(),
            released_by_others: self.0.released_by_others.load(Relaxed),
            released_at_once: self.0.released_at_once.load(Relaxed),
        }
    }
}

impl<S: PageSource> Inner<S> {
    /// Releases some queued slots. Returns their number.
    fn release_chunk(&self) -> u64 {
        let (ranges, count) = lock(&self.backlog).take(CHUNK);
        let in_hand = InHand {
            shared: self,
            count,
        };
        self.space.release_ranges(&ranges);
        self.released_by_others.fetch_add(in_hand.count, Relaxed);
        in_hand.count
    }

    fn work(&self) {
        (self.on_start)();
        loop {
            while self.release_chunk() > 0 {}
            let backlog = lock(&self.backlog);
            if backlog.is_waiting() {
                continue;
            }
            let linger = if backlog.is_closed() {
                Duration::ZERO
            } else {
                LINGER
            };
            let (mut backlog, _) = self
                .wake
                .wait_timeout(backlog, linger)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            if backlog.worker_leaves() {
                return;
            }
        }
    }
}

/// Slots that are being released, until it is dropped.
struct InHand<'a, S: PageSource> {
    shared: &'a Inner<S>,
    count: u64,
}

impl<S: PageSource> Drop for InHand<'_, S> {
    fn drop(&mut self) {
        if lock(&self.shared.backlog).finish(self.count) {
            self.shared.quiet.notify_all();
        }
    }
}

impl<S: PageSource + 'static> Drop for Gather<S> {
    fn drop(&mut self) {
        // Workers hold references to what they need, and exit by themselves.
        self.flush();
        lock(&self.0.backlog).close();
        self.0.wake.notify_all();
    }
}

impl<S: PageSource + 'static> fmt::Debug for Gather<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gather")
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
