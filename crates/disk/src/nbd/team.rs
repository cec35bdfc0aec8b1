//! Threads that serve reads of one client side by side.
//!
//! ```text
//!  client ─► requests in the buffer ─► a batch of reads ─► replies, in order
//!                                        ▲ each takes the next read until none is left
//!                          connection's thread, and threads of the team that are free
//! ```
//!
//! - The protocol lets requests that are under way at a time take effect in any order.
//! - A read is slow where its block is packed, in the file, or in a store on other machines; others are served faster than
//!   a thread wakes.
//! - The connection's thread takes part, and waits only for reads that another thread has taken: on a busy host, threads
//!   that come late find nothing left.
//! - Locks: `Batch::done` is held for no call. The queue's is held by the thread that waits for a job.

use crate::disk::Disk;
use crate::error::DiskError;
use crate::pace::Pace;
use memfold_swap::Scratch;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use zsmalloc::PageSource;

/// Threads beside the connections', at most. More keep more reads of the file or the store under way.
const THREADS: usize = 8;
/// Batches that wait for a thread. With more waiting, connections serve their reads alone.
const QUEUE: usize = 64;
/// Reads of one batch, at most.
pub(super) const MOST_READS: usize = 64;
/// Bytes of a read in a batch, at most. Longer ones pass through the connection's buffers.
pub(super) const MOST_BYTES: u32 = 64 << 10;

/// What a read came to; `None` if its thread panicked, or the server ends.
pub(super) type Outcome = Option<Result<Vec<u8>, DiskError>>;

/// A read that may be served beside others.
pub(super) struct OneRead {
    pub(super) range: Range<u64>,
    pub(super) pace: Pace,
}

/// Reads of one client that came together.
struct Batch<S: PageSource + 'static> {
    disk: Arc<Disk<S>>,
    ending: Arc<AtomicBool>,
    reads: Vec<Range<u64>>,
    /// The next that no thread has taken.
    next: AtomicUsize,
    done: Mutex<Done>,
    all_done: Condvar,
}

struct Done {
    outcomes: Vec<Outcome>,
    /// Reads that are not served yet.
    left: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read that a thread has taken. It counts as served once this is dropped, also by a panic.
struct Taken<'a, S: PageSource + 'static> {
    batch: &'a Batch<S>,
    index: usize,
    outcome: Outcome,
}

impl<S: PageSource + 'static> Drop for Taken<'_, S> {
    fn drop(&mut self) {
        let mut done = lock(&self.batch.done);
        done.outcomes[self.index] = self.outcome.take();
        done.left -= 1;
        if done.left == 0 {
            self.batch.all_done.notify_one();
        }
    }
}

impl<S: PageSource + 'static> Batch<S> {
    /// Serves reads until all are taken.
    fn work(&self, scratch: &mut Scratch) {
        // Each index goes to one thread. What is done with it is handed over by the lock.
        while let index = self.next.fetch_add(1, Relaxed)
            && let Some(range) = self.reads.get(index)
        {
            let mut taken = Taken {
                batch: self,
                index,
                outcome: None,
            };
            if self.ending.load(Relaxed) {
                continue;
            }
            let mut data = vec![0; (range.end - range.start) as usize];
            let read = self.disk.read(range.start, &mut data, scratch);
            taken.outcome = Some(read.map(|()| data));
        }
    }

    fn wait(&self) -> Vec<Outcome> {
        let done = lock(&self.done);
        let done = self.all_done.wait_while(done, |done| done.left > 0);
        std::mem::take(&mut done.unwrap_or_else(PoisonError::into_inner).outcomes)
    }
}

type Jobs<S> = SyncSender<Arc<Batch<S>>>;
type Start = dyn Fn() -> io::Result<JoinHandle<()>> + Send + Sync;

/// Threads that serve reads beside the connections' own, started when they are needed first. Dropping it ends them.
pub(crate) struct Team<S: PageSource + 'static> {
    disk: Arc<Disk<S>>,
    /// Whether nothing is served any more.
    ending: Arc<AtomicBool>,
    cpus: usize,
    /// None once it ends.
    jobs: Option<Jobs<S>>,
    start: Box<Start>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<S: PageSource + Send + Sync + 'static> Team<S> {
    /// A team without threads.
    pub(crate) fn new(disk: Arc<Disk<S>>) -> Self {
        let (jobs, queue) = mpsc::sync_channel(QUEUE);
        let queue: Arc<Mutex<Receiver<Arc<Batch<S>>>>> = Arc::new(Mutex::new(queue));
        let start = move || {
            let queue = Arc::clone(&queue);
            let builder = std::thread::Builder::new().name("memfold-reads".to_owned());
            builder.spawn(move || {
                let mut scratch = Scratch::new();
                let next = || lock(&queue).recv();
                while let Ok(batch) = next() {
                    batch.work(&mut scratch);
                }
            })
        };
        Team {
            disk,
            ending: Arc::default(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            jobs: Some(jobs),
            start: Box::new(start),
            threads: Mutex::default(),
        }
    }
}

impl<S: PageSource + 'static> Team<S> {
    /// Has connections serve no further request, of those either that have come already.
    pub(super) fn end(&self) {
        self.ending.store(true, Relaxed);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }

    /// The threads that are worth waking for reads.
    fn helpers(&self, reads: &[OneRead]) -> usize {
        let with = |pace| reads.iter().filter(|read| read.pace == pace).count();
        let (busy, waiting) = (with(Pace::Slow), with(Pace::Waits));
        let helpers = busy.saturating_sub(1).min(self.cpus - 1) + waiting;
        helpers.min(reads.len().saturating_sub(1)).min(THREADS)
    }

    /// Has so many threads, if they can be had.
    fn grow(&self, count: usize) {
        let mut threads = lock(&self.threads);
        while threads.len() < count {
            match (self.start)() {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    log::debug!("reads are served by fewer threads: {error}");
                    return;
                }
            }
        }
    }

    /// Serves reads inside the disk side by side; outcomes are in their order. `None` if that would take longer than one
    /// after the other.
    pub(super) fn serve(&self, reads: &[OneRead], scratch: &mut Scratch) -> Option<Vec<Outcome>> {
        let helpers = self.helpers(reads);
        if helpers == 0 {
            return None;
        }
        self.grow(helpers);
        let batch = Arc::new(Batch {
            disk: Arc::clone(&self.disk),
            ending: Arc::clone(&self.ending),
            reads: reads.iter().map(|read| read.range.clone()).collect(),
            next: AtomicUsize::new(0),
            done: Mutex::new(Done {
                outcomes: vec![None; reads.len()],
                left: reads.len(),
            }),
            all_done: Condvar::new(),
        });
        if let Some(jobs) = &self.jobs {
            // Where the queue is full, all are at work.
            let begin = |_: &usize| jobs.try_send(Arc::clone(&batch)).is_ok();
            (0..helpers).take_while(begin).for_each(drop);
        }
        batch.work(scratch);
        Some(batch.wait())
    }
}

impl<S: PageSource + 'static> Drop for Team<S> {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in lock(&self.threads).drain(..) {
            // It panics only where the swap space finds a bug, and has reported it.
            let _ = thread.join();
        }
    }
}
