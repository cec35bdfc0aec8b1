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

/// How long the drainer lets words accumulate: from the first value while many arrive up to the
/// second while few do. Longer saves wake-ups and delays the return of memory.
const COLLECT: Duration = Duration::from_micros(100);
const COLLECT_LONGEST: Duration = Duration::from_millis(4);

/// Words that are freed without waiting for more; fewer than `FEW` in one batch double the time to
/// accumulate.
const MANY: usize = 4096;
const FEW: usize = 256;

/// Idle time after which the drainer returns what is retained for reuse to the kernel.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// Freed pages that are worth one more helper thread: starting one costs as much as returning a few
/// hundred pages.
const HELPER_PAGES: usize = 4096;
const MAX_HELPERS: usize = 3;

/// Time without a bulk free after which bulk frees count as ended. No helper is started earlier, as
/// it might run on their CPU.
const LULL: Duration = Duration::from_micros(500);
/// The longest time that memory waits for bulk frees to end.
const LONGEST_WAY: Duration = Duration::from_millis(2);

/// Words freed at once: with more words, more of them share a bin.
const BATCH: usize = 64 * 1024;

/// A thread that does the deferred frees of a pool and returns the memory of bulk frees to the
/// kernel, until it is dropped.
///
/// It sleeps until the first deferred free, lets frees accumulate for 0.1 ms (up to 4 ms when few
/// arrive) or until a quarter of a queue is filled, and then does them in bulk. When no more
/// arrive, or a quarter of the pool's memory is waiting, it returns all memory that holds no object
/// to the kernel, including what was retained for reuse: at once after many frees, otherwise after
/// 50 ms without a deferred free; free parts of huge pages only in the latter case, and only if
/// there is much of them. Memory of bulk frees waits until there has been none for 0.5 ms, but at
/// most 2 ms. With much to return, the drainer starts helper threads, one for each other CPU, at
/// most three. A pool should have one drainer; further ones do no harm but are not woken. What a
/// bulk free leaves to a drainer that is being dropped waits for the next free, or the next store
/// that needs memory.
///
/// ```
/// use std::sync::Arc;
/// use zsmalloc::{Config, Drainer, HeapSource, Pool};
///
/// let pool = Arc::new(Pool::new(HeapSource::new(), Config::with_capacity_pages(4096))?);
/// let drainer = Drainer::spawn(Arc::clone(&pool))?;
/// let word = pool.store(&[b"an object"])?;
/// pool.free_deferred(word);
/// // Stops the thread after it has done what was deferred.
/// drop(drainer);
/// assert_eq!(pool.deferred_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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

    /// Starts the thread, which calls `prepare` first: to set its priority, say, which its helpers
    /// inherit. While other threads keep all CPUs busy, a drainer of higher priority returns memory
    /// sooner.
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
            // The drain loop cannot panic, as the pool counts misuse; a panic of `prepare` was
            // already reported.
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
    // Words freed since memory was last returned to the kernel.
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
        // The pool counted misuse.
        let freed = match room.as_mut_slice() {
            // There was no memory for a buffer.
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

/// Sleeps while there are bulk frees, for a bounded time: this thread may be on their CPU, and more
/// frees empty more zspages.
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

/// Returns all memory that holds no object to the kernel, except free parts of huge pages.
fn give_back<S: PageSource + 'static>(pool: &Pool<S>, helpers: &mut Helpers<S>, lull: &mut Lull) {
    pool.release_empty(0..pool.classes().len());
    discard_helped(pool, helpers, lull);
}

/// Returns the memory of freed runs to the kernel. The kernel does most of the work, so with much
/// memory several threads share it.
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

/// Threads that return memory beside the drainer, which does not wait for them: on a busy machine
/// they may start after the work is done.
struct Helpers<S: PageSource + 'static> {
    pool: Arc<Pool<S>>,
    most: usize,
    threads: Vec<JoinHandle<()>>,
}

impl<S: PageSource + 'static> Helpers<S> {
    fn new(pool: Arc<Pool<S>>) -> Self {
        // Read once, as it reads cgroup files.
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self {
            pool,
            most: MAX_HELPERS.min(processors - 1),
            threads: Vec::new(),
        }
    }

    /// Starts threads until `wanted` are running, or no more can be started.
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
            // Only the page source can panic, and has reported it.
            let _ = thread.join();
        }
    }
}
