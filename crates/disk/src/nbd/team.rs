//! Threads that serve reads of one client side by side.
//!
//! ```text
//!  client ─► requests in the buffer ─► a batch: quick reads, then those that wait ─► replies
//!                                      └► connection's thread      threads of the ◄┘
//!                                         from the front           team from the back
//! ```
//!
//! - The protocol lets requests that are under way at a time take effect in any order.
//! - A read is slow where its block is packed, in the file, or in a store on other machines; others are served faster than
//!   a thread wakes.
//! - The connection's thread takes part, and waits only for reads that another thread has taken: on a busy host, threads
//!   that come late find nothing left.
//! - Before it takes a read that waits for the file or a store, and before it waits for others, it sends what is done. What
//!   only CPUs were busy with is answered in the order of the requests.
//! - Locks: `Batch::left` and `Batch::done` are held for no call. The queue's is held by the thread that waits for a job.

use crate::disk::Disk;
use crate::error::DiskError;
use crate::pace::Pace;
use crate::sync::{lock, unpoisoned};
use memfold_swap::Scratch;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
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

/// Reads of one client that came together: first the quick ones.
pub(super) struct Batch<S: PageSource + 'static> {
    disk: Arc<Disk<S>>,
    ending: Arc<AtomicBool>,
    reads: Vec<Range<u64>>,
    /// The number of reads that wait neither for the file nor a store.
    quick: usize,
    /// The indices of reads that no thread has taken.
    left: Mutex<Range<usize>>,
    done: Mutex<Done>,
    /// Another is served that is waited for.
    changed: Condvar,
}

struct Done {
    /// By the index of each read that is served. The connection's thread takes them.
    outcomes: Vec<(usize, Outcome)>,
    /// Reads that are not served yet.
    left: usize,
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
        done.outcomes.push((self.index, self.outcome.take()));
        done.left -= 1;
        if done.left == 0 || self.batch.waits() {
            self.batch.changed.notify_one();
        }
    }
}

impl<S: PageSource + 'static> Batch<S> {
    /// Whether it has reads that wait for the file or a store.
    pub(super) fn waits(&self) -> bool {
        self.quick < self.reads.len()
    }

    /// For the connection's thread: serves reads that wait for nothing until all of them are taken.
    pub(super) fn serve_quick(&self, scratch: &mut Scratch) {
        let quick = |left: &mut Range<usize>| {
            if left.start < self.quick {
                left.next()
            } else {
                None
            }
        };
        while let Some(index) = self.take(quick) {
            self.serve(index, scratch);
        }
    }

    /// For the connection's thread: serves another; `false` if all are taken.
    pub(super) fn serve_one(&self, scratch: &mut Scratch) -> bool {
        let index = self.take(Iterator::next);
        index.is_some_and(|index| {
            self.serve(index, scratch);
            true
        })
    }

    /// For threads of the team: serves reads until all are taken.
    fn work(&self, scratch: &mut Scratch) {
        while let Some(index) = self.take(DoubleEndedIterator::next_back) {
            self.serve(index, scratch);
        }
    }

    fn take(&self, from: impl FnOnce(&mut Range<usize>) -> Option<usize>) -> Option<usize> {
        from(&mut lock(&self.left))
    }

    fn serve(&self, index: usize, scratch: &mut Scratch) {
        let mut taken = Taken {
            batch: self,
            index,
            outcome: None,
        };
        if self.ending.load(Relaxed) {
            return;
        }
        let range = &self.reads[index];
        let mut data = vec![0; (range.end - range.start) as usize];
        let read = self.disk.read(range.start, &mut data, scratch);
        taken.outcome = Some(read.map(|()| data));
    }

    /// For the connection's thread: the outcomes of reads that are served and that it does not have yet.
    pub(super) fn finished(&self) -> Vec<(usize, Outcome)> {
        Self::outcomes(lock(&self.done))
    }

    /// The same, once all are served; or once another is, if some wait for the file or a store. None if it has all.
    pub(super) fn wait(&self) -> Vec<(usize, Outcome)> {
        let is_awaited =
            |done: &mut Done| done.left > 0 && (done.outcomes.is_empty() || !self.waits());
        let done = self.changed.wait_while(lock(&self.done), is_awaited);
        Self::outcomes(unpoisoned(done))
    }

    /// In the order of the batch.
    fn outcomes(mut done: MutexGuard<'_, Done>) -> Vec<(usize, Outcome)> {
        let mut outcomes = std::mem::take(&mut done.outcomes);
        drop(done);
        outcomes.sort_unstable_by_key(|(index, _)| *index);
        outcomes
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

    /// Has `count` threads, if they can be had.
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

    /// Begins to serve reads inside the disk side by side, of which those that wait are the last. `None` if that would take
    /// longer than one after the other.
    pub(super) fn begin(&self, reads: &[OneRead]) -> Option<Arc<Batch<S>>> {
        let helpers = self.helpers(reads);
        if helpers == 0 {
            return None;
        }
        self.grow(helpers);
        let batch = Arc::new(Batch {
            disk: Arc::clone(&self.disk),
            ending: Arc::clone(&self.ending),
            reads: reads.iter().map(|read| read.range.clone()).collect(),
            quick: reads.partition_point(|read| read.pace < Pace::Waits),
            left: Mutex::new(0..reads.len()),
            done: Mutex::new(Done {
                outcomes: Vec::with_capacity(reads.len()),
                left: reads.len(),
            }),
            changed: Condvar::new(),
        });
        if let Some(jobs) = &self.jobs {
            // Where the queue is full, all are at work.
            let begin = |_: &usize| jobs.try_send(Arc::clone(&batch)).is_ok();
            (0..helpers).take_while(begin).for_each(drop);
        }
        Some(batch)
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
