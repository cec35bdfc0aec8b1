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
/// It found nothing to do; the next word wakes it.
const IDLE: u8 = 2;

/// How long words may come together before they are freed. What this adds to the time until the
/// memory is back, it saves in wake-ups and in looking up the same zspage again and again.
const COLLECT: Duration = Duration::from_millis(2);

/// A wake-up can be missed: the word is queued and the state read without a fence in between, to
/// keep the deferral cheap. So an idle drainer looks for itself now and then.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// How many words are freed at once: the more, the more of them share a zspage, and the longer are
/// the runs of pages that go back together.
const BATCH: usize = 64 * 1024;

/// How a pool wakes its drainer.
#[derive(Debug)]
pub(crate) struct DrainSignal {
    state: AtomicU8,
    drainer: Mutex<Option<Thread>>,
}

impl DrainSignal {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
            drainer: Mutex::new(None),
        }
    }

    #[inline]
    pub(crate) fn after_push(&self, ring: &Ring) {
        let state = self.state.load(Ordering::Relaxed);
        if state == IDLE || (state == COLLECTING && ring.len() >= ring.places() / 4) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.state.swap(AWAKE, Ordering::Relaxed) != AWAKE
            && let Some(drainer) = &*self.drainer.lock().unwrap_or_else(PoisonError::into_inner)
        {
            drainer.unpark();
        }
    }

    fn set_drainer(&self, drainer: Option<Thread>) {
        *self.drainer.lock().unwrap_or_else(PoisonError::into_inner) = drainer;
    }
}

/// A thread that does the deferred frees of a pool until it is dropped.
///
/// It sleeps while there is nothing to do, is woken by the first deferred free after that, and
/// lets frees come together for two milliseconds, or until a quarter of a queue is filled, before
/// it does them in bulk. A pool should have one drainer at a time; more do no harm but are not
/// woken.
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
    let mut room = vec![ObjectWord::PLACEHOLDER; BATCH];
    while !stop.load(Ordering::Acquire) {
        if pool.deferred_bytes() == 0 {
            sleep(pool, IDLE, IDLE_POLL);
        }
        if pool.deferred_bytes() > 0 && !stop.load(Ordering::Acquire) {
            sleep(pool, COLLECTING, COLLECT);
        }
        // A word that names nothing was counted by the pool.
        let freed = pool.flush_through(&mut room);
        if freed != Ok(0) && pool.deferred_bytes() == 0 {
            // The end of a burst: what was held back goes back too.
            pool.trim();
        }
    }
    signal.set_drainer(None);
    signal.state.store(AWAKE, Ordering::Relaxed);
    let _ = pool.flush_deferred();
}

fn sleep<S: PageSource>(pool: &Pool<S>, state: u8, at_most: Duration) {
    let signal = &pool.drain_signal;
    signal.state.store(state, Ordering::SeqCst);
    if state == IDLE && pool.deferred_bytes() > 0 {
        // It came just before the state was set.
        signal.state.store(AWAKE, Ordering::Relaxed);
        return;
    }
    thread::park_timeout(at_most);
    signal.state.store(AWAKE, Ordering::Relaxed);
}
