//! A thread that does deferred frees.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    bulk::Groups, error::MisuseError, pool::Pool, signal::Woken, source::PageSource,
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
/// And so many words to free.
const HELPER_WORDS: usize = 16 * 1024;
const MAX_HELPERS: usize = 3;

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
/// otherwise; free parts of huge pages, if they are much, after these only. Where there is much to
/// do, threads that it starts for the purpose help it, as many as there are other processors, but at
/// most three. A pool should have one drainer at a time; more do no harm but are not woken. What a
/// bulk free leaves to a drainer that is just being dropped waits for the next free or store that
/// looks for memory.
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
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("zsmalloc-drain".to_owned())
            .spawn(move || drain(&pool, &stopped))?;
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
            // The thread cannot panic: misuse is counted by the pool.
            let _ = thread.join();
        }
    }
}

fn drain<S: PageSource>(pool: &Pool<S>, stop: &AtomicBool) {
    let signal = &pool.drain_signal;
    signal.set_drainer(Some(crate::sync::thread::current()));
    let mut room = Vec::new();
    if room.try_reserve_exact(BATCH).is_ok() {
        room.resize(BATCH, ObjectWord::PLACEHOLDER);
    }
    let words_wait = || pool.deferred_bytes() > 0;
    // Once: to find out, the system's files on limits are read.
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let mut collect = COLLECT;
    // Words freed since the memory they held was given back.
    let mut burst = 0;
    while !stop.load(Ordering::Acquire) {
        if !words_wait() {
            if signal.take_memory() || burst >= FEW {
                // More frees may follow, and empty what would be split now.
                give_back(pool, processors, HugePages::Leave);
                burst = 0;
                continue;
            }
            if signal.sleep_idle(IDLE_POLL, words_wait) == Woken::ByTime {
                give_back(pool, processors, HugePages::Split);
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
            room => pool.flush_through(room, |words| free_helped(pool, words, processors)),
        };
        let freed = freed.unwrap_or(FEW);
        burst += freed;
        collect = if freed < FEW {
            COLLECT_LONGEST.min(collect * 2)
        } else {
            COLLECT
        };
        if signal.memory_waits() && pool.much_is_warm() {
            discard_helped(pool, processors, || pool.discard_all_warm());
        }
    }
    signal.set_drainer(None);
    let _ = pool.flush_deferred();
    if signal.take_memory() {
        pool.trim();
    }
}

/// What to do with free parts of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HugePages {
    Leave,
    /// Give them back if they are much of the pool.
    Split,
}

/// Gives all memory back that holds no object.
fn give_back<S: PageSource>(pool: &Pool<S>, processors: usize, huge_pages: HugePages) {
    discard_helped(pool, processors, || pool.trim_empty());
    if huge_pages == HugePages::Split {
        pool.limit_spare(2);
    }
}

/// Gives the memory of freed runs back, as `own` does. What it costs is the system's work: with much
/// of it, and other processors that may be idle, several threads do it at once.
fn discard_helped<S: PageSource>(pool: &Pool<S>, processors: usize, own: impl FnOnce() -> usize) {
    let helpers = (pool.warm_pages() / HELPER_PAGES).min(processors - 1);
    let help = || {
        pool.discard_all_warm();
    };
    with_helpers(helpers, help, || {
        own();
    });
}

/// Frees words, with the help of other processors if they are many: what it takes is mostly waiting
/// for memory.
fn free_helped<S: PageSource>(
    pool: &Pool<S>,
    words: &mut [ObjectWord],
    processors: usize,
) -> Result<(), MisuseError> {
    let helpers = (words.len() / HELPER_WORDS).min(processors - 1);
    if helpers == 0 {
        return pool.try_free_bulk(words);
    }
    // Each takes the next class: nobody waits for the bins of another.
    let groups = Mutex::new(Groups::of(words, pool.classes().len()));
    let outcome = Mutex::new(Ok(()));
    let free = || {
        let freed = pool.free_groups_of(|| lock(&groups).next());
        let mut outcome = lock(&outcome);
        *outcome = outcome.and(freed);
    };
    with_helpers(helpers, free, free);
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `own` while other threads do `help`, as far as there are any to be had.
fn with_helpers(helpers: usize, help: impl Fn() + Sync, own: impl FnOnce()) {
    if helpers == 0 {
        return own();
    }
    thread::scope(|scope| {
        for _ in 0..helpers.min(MAX_HELPERS) {
            // If there is no thread to be had, this one does it all.
            let _ = thread::Builder::new()
                .name("zsmalloc-help".to_owned())
                .spawn_scoped(scope, &help);
        }
        own();
    });
}
