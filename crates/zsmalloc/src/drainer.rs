//! A thread that does deferred frees.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    pool::Pool,
    signal::{DrainSignal, Lull, Woken},
    source::PageSource,
    word::ObjectWord,
};

/// How long words may come together before they are freed. It adds to the time until the memory
/// is back, and saves wake-ups: so it is short in a burst, and longer the fewer words come.
const COLLECT: Duration = Duration::from_micros(100);
const COLLECT_LONGEST: Duration = Duration::from_millis(4);

/// So many words are freed without waiting for more. Few that come together mean a longer wait.
const MANY: usize = 4096;
const FEW: usize = 256;

/// A drainer that has found nothing to do for so long gives back what was held back for reuse.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// So many freed pages are worth another thread to give them back, which costs about as much to
/// start as a few hundred of them.
const HELPER_PAGES: usize = 4096;
const MAX_HELPERS: usize = 3;

/// Bulk frees have ended when none has been going on for so long. Before that no helper is started:
/// it might run on their processor.
const LULL: Duration = Duration::from_micros(500);
/// So long memory may wait for that.
const LONGEST_WAY: Duration = Duration::from_millis(2);

/// How many words are freed at once: the more, the more of them share a bin.
const BATCH: usize = 64 * 1024;

/// A thread that does the deferred frees of a pool, and gives back the memory of bulk ones, until
/// it is dropped.
///
/// It sleeps while there is nothing to do, is woken by the first deferred free after that, and
/// lets frees come together for a tenth of a millisecond (up to four milliseconds when few come),
/// or until a quarter of a queue is filled, before it does them in bulk. When no more come, or a
/// quarter of the pool's memory waits, it gives all memory that holds no object back, what was held
/// back for reuse included: at once after many frees, after 50 milliseconds without a deferred one
/// otherwise; free parts of huge pages, if they are much, after these only. It makes way for bulk
/// frees: what they leave waits until none has been going on for half a millisecond, or for two
/// milliseconds. Where there is much to give back, threads that it starts for the purpose help it, as
/// many as there are other processors, but at most three. A pool should have one drainer at a time; more
/// do no harm but are not woken. What a bulk free leaves to a drainer that is just being dropped
/// waits for the next free or store that looks for memory.
#[derive(Debug)]
pub struct Drainer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drainer {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn spawn<S: PageSource + 'static>(pool: Arc<Pool<S>>) -> io::Result<Self> {
        Self::spawn_with(pool, || ())
    }

    /// Starts the thread, which does `prepare` first: what is to hold for it and, as threads inherit
    /// that, for those that help it, such as a priority. Where other threads keep all processors
    /// busy, a drainer of high priority gives memory back two to four times sooner, for the same
    /// work.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn spawn_with<S: PageSource + 'static>(
        pool: Arc<Pool<S>>,
        prepare: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("zsmalloc-drain".to_owned())
            .spawn(move || {
                prepare();
                drain(pool, &stopped);
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Drainer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread itself cannot panic, as misuse is counted by the pool; what prepares it has
            // said why.
            let _ = thread.join();
        }
    }
}

fn drain<S: PageSource + 'static>(pool: Arc<Pool<S>>, stop: &AtomicBool) {
    let mut helpers = Helpers::new(pool.clone());
    let pool = &*pool;
    let signal = &pool.drain_signal;
    signal.set_drainer(Some(crate::sync::thread::current()));
    let mut room = Vec::new();
    if room.try_reserve_exact(BATCH).is_ok() {
        room.resize(BATCH, ObjectWord::PLACEHOLDER);
    }
    let words_wait = || pool.deferred_bytes() > 0;
    let mut lull = Lull::new();
    let mut collect = COLLECT;
    // Words freed since the memory they held was given back.
    let mut burst = 0;
    while !stop.load(Ordering::Acquire) {
        if !words_wait() {
            let memory_waits = signal.memory_waits();
            if memory_waits || burst >= FEW {
                if memory_waits {
                    make_way(signal, &mut lull, words_wait);
                }
                signal.take_memory();
                give_back(pool, &mut helpers, &mut lull);
                burst = 0;
                continue;
            }
            if signal.sleep_idle(IDLE_POLL, words_wait) == Woken::ByTime {
                give_back(pool, &mut helpers, &mut lull);
                pool.limit_spare(2);
                burst = 0;
                continue;
            }
            collect = COLLECT;
        }
        if words_wait() && pool.deferred_words() < MANY {
            signal.sleep_collecting(collect);
        }
        // A word that names nothing was counted by the pool.
        let freed = match room.as_mut_slice() {
            // There was no memory for more than the stack holds.
            [] => pool.flush_deferred(),
            room => pool.flush_through(room),
        };
        let freed = freed.unwrap_or(FEW);
        burst += freed;
        collect = if freed < FEW {
            COLLECT_LONGEST.min(collect * 2)
        } else {
            COLLECT
        };
        if words_wait() && signal.memory_waits() && pool.much_is_warm() {
            discard_helped(pool, &mut helpers, &mut lull);
        }
    }
    signal.set_drainer(None);
    let _ = pool.flush_deferred();
    if signal.take_memory() {
        pool.trim();
    }
}

/// Sleeps while bulk frees follow one another, but not for long: it may be on their processor that
/// this thread was woken, and more of them empty more.
fn make_way(signal: &DrainSignal, lull: &mut Lull, words_wait: impl Fn() -> bool) {
    let start = Instant::now();
    while start.elapsed() < LONGEST_WAY && !words_wait() {
        let left = lull.left(signal, LULL);
        if left.is_zero() {
            break;
        }
        thread::park_timeout(left);
    }
}

/// Gives all memory back that holds no object, but for free parts of huge pages.
fn give_back<S: PageSource + 'static>(pool: &Pool<S>, helpers: &mut Helpers<S>, lull: &mut Lull) {
    pool.release_empty(0..pool.classes().len());
    discard_helped(pool, helpers, lull);
}

/// Gives the memory of freed runs back. What it costs is the system's work: with much of it, and
/// other processors that may be idle, several threads do it at once.
fn discard_helped<S: PageSource + 'static>(
    pool: &Pool<S>,
    helpers: &mut Helpers<S>,
    lull: &mut Lull,
) {
    loop {
        let wanted = pool.warm_pages() / HELPER_PAGES;
        if wanted > 0 && lull.left(&pool.drain_signal, LULL).is_zero() {
            helpers.start(wanted);
        }
        if pool.discard_some() == 0 {
            break;
        }
    }
}

/// Threads that give memory back beside the drainer, which does not wait for them: on a busy
/// processor one may not have begun when there is nothing left to do.
struct Helpers<S: PageSource + 'static> {
    pool: Arc<Pool<S>>,
    most: usize,
    threads: Vec<JoinHandle<()>>,
}

impl<S: PageSource + 'static> Helpers<S> {
    fn new(pool: Arc<Pool<S>>) -> Self {
        // Once: to find out, the system's files on limits are read.
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self {
            pool,
            most: MAX_HELPERS.min(processors - 1),
            threads: Vec::new(),
        }
    }

    /// Starts threads until `wanted` are at work, as far as there are any to be had.
    fn start(&mut self, wanted: usize) {
        self.threads.retain(|thread| !thread.is_finished());
        while self.threads.len() < wanted.min(self.most) {
            let pool = self.pool.clone();
            let started = thread::Builder::new()
                .name("zsmalloc-help".to_owned())
                .spawn(move || {
                    pool.discard_all_warm();
                });
            match started {
                Ok(thread) => self.threads.push(thread),
                Err(_) => break,
            }
        }
    }
}

impl<S: PageSource + 'static> Drop for Helpers<S> {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            // Only its page source can panic, and has said why.
            let _ = thread.join();
        }
    }
}
