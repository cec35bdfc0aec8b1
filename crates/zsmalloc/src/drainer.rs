//! A thread that does deferred frees.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::Duration,
};

use crate::{pool::Pool, ring::Ring, source::PageSource, word::ObjectWord};

/// No drainer sleeps: it runs, or there is none.
const AWAKE: u8 = 0;
/// It sleeps a moment so that more words come together; a well filled queue wakes it.
const COLLECTING: u8 = 1;
/// It found nothing to do; the next word, or memory to give back, wakes it.
const IDLE: u8 = 2;

/// How long words may come together before they are freed. It adds to the time until the memory
/// is back, and saves wake-ups: so it is short in a burst, and longer the fewer words come.
const COLLECT: Duration = Duration::from_micros(100);
const COLLECT_LONGEST: Duration = Duration::from_millis(4);

/// So many words are freed without waiting for more. Few that come together mean a longer wait.
const MANY: usize = 4096;
const FEW: usize = 256;

/// A wake-up can be missed: the word is queued and the state read without a fence in between, to
/// keep the deferral cheap. So an idle drainer looks for itself now and then.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// How many words are freed at once: the more, the more of them share a bin.
const BATCH: usize = 64 * 1024;

/// How a pool wakes its drainer.
#[derive(Debug)]
pub(crate) struct DrainSignal {
    state: AtomicU8,
    /// There is memory that waits for the drainer to give it back.
    give_back: AtomicBool,
    drainer: Mutex<Option<Thread>>,
    /// Whether `drainer` is there.
    present: AtomicBool,
}

impl DrainSignal {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
            give_back: AtomicBool::new(false),
            drainer: Mutex::new(None),
            present: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(crate) fn after_push(&self, ring: &Ring) {
        let state = self.state.load(Ordering::Relaxed);
        if state == IDLE || (state == COLLECTING && ring.len() >= ring.places() / 4) {
            self.wake();
        }
    }

    /// Leaves it to the drainer to give memory back; `false` if there is none.
    pub(crate) fn leave_memory(&self) -> bool {
        if !self.present.load(Ordering::Relaxed) {
            return false;
        }
        // Sequentially consistent, here and in `sleep`: it cannot be overlooked.
        self.give_back.store(true, Ordering::SeqCst);
        if self.state.load(Ordering::SeqCst) != AWAKE {
            self.wake();
        }
        true
    }

    #[cold]
    fn wake(&self) {
        if self.state.swap(AWAKE, Ordering::SeqCst) != AWAKE
            && let Some(drainer) = &*self.drainer.lock().unwrap_or_else(PoisonError::into_inner)
        {
            drainer.unpark();
        }
    }

    fn set_drainer(&self, drainer: Option<Thread>) {
        self.present.store(drainer.is_some(), Ordering::Relaxed);
        *self.drainer.lock().unwrap_or_else(PoisonError::into_inner) = drainer;
    }
}

/// A thread that does the deferred frees of a pool, and gives back the memory of bulk ones, until
/// it is dropped.
///
/// It sleeps while there is nothing to do, is woken by the first deferred free after that, and
/// lets frees come together for a tenth of a millisecond (up to four milliseconds when few come),
/// or until a quarter of a queue is filled, before it does them in bulk. When no more come, or a
/// quarter of the pool's memory waits, it gives all memory that holds no object back, what was held
/// back for reuse included: at once after many frees, after 50 milliseconds without a deferred one
/// otherwise. A pool should have one drainer at a time; more do no harm but are not woken. What a
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
    signal.set_drainer(Some(thread::current()));
    let mut room = Vec::new();
    if room.try_reserve_exact(BATCH).is_ok() {
        room.resize(BATCH, ObjectWord::PLACEHOLDER);
    }
    let mut collect = COLLECT;
    // Words freed since the memory they held was given back.
    let mut burst = 0;
    while !stop.load(Ordering::Acquire) {
        if pool.deferred_bytes() == 0 {
            // Memory that is left to this thread from here on is seen the next time.
            let give_back = signal.give_back.swap(false, Ordering::SeqCst) || burst >= FEW;
            if give_back || sleep(pool, IDLE, IDLE_POLL) == Woken::ByTime {
                pool.trim();
                burst = 0;
                continue;
            }
            collect = COLLECT;
        }
        if pool.deferred_bytes() > 0 && pool.deferred_words() < MANY {
            sleep(pool, COLLECTING, collect);
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
        if signal.give_back.load(Ordering::Relaxed) && pool.much_is_warm() {
            pool.discard_all_warm();
        }
    }
    signal.set_drainer(None);
    signal.state.store(AWAKE, Ordering::Relaxed);
    let _ = pool.flush_deferred();
    if signal.give_back.swap(false, Ordering::SeqCst) {
        pool.trim();
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Woken {
    ByTime,
    ForWork,
}

fn sleep<S: PageSource>(pool: &Pool<S>, state: u8, at_most: Duration) -> Woken {
    let signal = &pool.drain_signal;
    signal.state.store(state, Ordering::SeqCst);
    let overlooked = pool.deferred_bytes() > 0 || signal.give_back.load(Ordering::SeqCst);
    if !(state == IDLE && overlooked) {
        thread::park_timeout(at_most);
    }
    match signal.state.swap(AWAKE, Ordering::SeqCst) {
        _ if overlooked => Woken::ForWork,
        AWAKE => Woken::ForWork,
        _ => Woken::ByTime,
    }
}
