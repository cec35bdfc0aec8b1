//! The threads that bring in and send pages on other machines.
//!
//! The pool may take half of the limit. Threads that need room wait while it takes more and the store takes
//! pages: a slow store slows them down, and the limit holds. A store that takes none, or less than what is asked for
//! in seconds, is not waited for.

use super::area::Area;
use super::engine_state::EngineState;
use super::fault::Cause;
use super::remote_queue::THREADS;
use super::stats::count;
use super::streams::Advice;
use super::worker;
use crate::sync::lock;
use memfold_swap::{Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use memfold_sys::owned_uffd::borrow;
use memfold_sys::thread::nap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Between two looks at the pool's size. Longer lets the pool grow by more beyond its share.
const INTERVAL: Duration = Duration::from_millis(20);
/// Bytes that are sent at once. More makes fewer, longer calls.
const AT_ONCE: u64 = 1 << 20;
/// After a failure nothing is sent for as long.
const REST: Duration = Duration::from_millis(100);
/// Between two looks of a thread that waits for the store. Longer takes less CPU time, and leaves the store
/// unused for longer once there is room.
const NAP: Duration = Duration::from_micros(500);

/// The longest of such waits. Longer lets the pool grow less beyond its share where the store takes little, and holds
/// a thread for longer, in a signal handler perhaps.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Sizes of the pool.
struct Share {
    /// Above this pages are sent.
    start: u64,
    /// Until it is below this.
    stop: u64,
    /// Above this no thread enlarges it while the store takes pages.
    most: u64,
}

impl Share {
    fn of(limit: u64) -> Share {
        let most = limit / 2;
        Share {
            start: most - limit / 64,
            stop: most - limit / 32,
            most,
        }
    }
}

impl EngineState {
    /// Whether the page in a slot is on other machines.
    pub(super) fn is_remote(&self, slot: Slot) -> bool {
        self.remote.is_some() && self.space.may_wait(slot)
    }

    /// Brings pages in from the store until the engine stops.
    pub(super) fn remote_thread(&self) {
        let Some(remote) = &self.remote else { return };
        let number = remote.taken.fetch_add(1, Ordering::Relaxed) as usize;
        let queue = &remote.queues[number % THREADS];
        while !self.is_stopping() {
            // It stays in the queue until it is done, so that it is not queued again.
            let first = lock(&queue.waiting).front().cloned();
            let Some((area, span)) = first else {
                queue.event.wait(Duration::from_secs(1));
                continue;
            };
            self.bring_in_remote(&area, span);
            lock(&queue.waiting).pop_front();
            if let Some(uffd) = &self.uffd {
                // Whatever became of the page, who waits for it looks again.
                let page = span.address as u64;
                let _ = borrow(uffd).wake(page, PAGE_SIZE as u64);
            }
        }
        // The areas hold the engine.
        lock(&queue.waiting).clear();
    }

    /// Brings in the pages of a span that are on other machines.
    fn bring_in_remote(&self, area: &Area, span: Advice) {
        if area.mapped().is_none() {
            return;
        }
        let mut worker = worker::take();
        // Before the gate is entered: for room, pages of any area move out, this one included. A thread that enters its
        // gate twice waits for itself where another began to wait in between, to unmap the area.
        let room = self.make_room(u64::from(span.count), Cause::Remote, &mut worker);
        let Some(_mapped) = area.mapped() else {
            self.account.release(room);
            return;
        };
        let brought = self.swap_in_with(room, area, span, Cause::Remote, &mut worker);
        let faults = u64::from(brought > 0);
        count(&self.counters.faults_swap_in, faults);
        count(&self.counters.remote_faults, faults);
    }

    /// Sends what does not fit into half of the limit, oldest first, until the engine stops.
    pub(super) fn send_thread(&self) {
        let Some(remote) = &self.remote else { return };
        let share = self.share();
        let mut scratch = Scratch::new();
        while !self.is_stopping() {
            remote.to_send.wait(INTERVAL);
            if self.space.pool_bytes() <= share.start {
                continue;
            }
            while !self.is_stopping() {
                let excess = self.space.pool_bytes().saturating_sub(share.stop);
                if excess == 0 {
                    break;
                }
                let report = self.space.write_back(excess.min(AT_ONCE), &mut scratch);
                // The memory is free once its zspages are, and the limit is for what is left.
                self.space.trim_spare();
                self.refresh_account();
                let takes = report.moved > 0;
                remote.takes_pages.store(takes, Ordering::Relaxed);
                self.compression.note_outlet(takes);
                if !takes {
                    remote.to_send.wait(REST);
                    break;
                }
            }
        }
    }

    fn share(&self) -> Share {
        Share::of(self.account.limit().total_bytes.unwrap_or(u64::MAX))
    }

    /// Waits while the pool takes more than its share and the store takes pages, before it is enlarged. The
    /// thread that sends needs nothing that a waiting thread has. A store that takes a few pages now and then
    /// does not hold the thread: it waits for at most `LONGEST_WAIT`.
    pub(super) fn wait_for_store(&self) {
        let Some(remote) = &self.remote else { return };
        let share = self.share();
        let pool = || self.space.pool_bytes();
        if pool() > share.start {
            remote.to_send.set();
        }
        let waits = || {
            pool() > share.most && remote.takes_pages.load(Ordering::Relaxed) && !self.is_stopping()
        };
        if !waits() {
            return;
        }
        count(&self.counters.remote_room_waits, 1);
        let began = Instant::now();
        while waits() && began.elapsed() < LONGEST_WAIT {
            nap(NAP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::WORKERS;
    use super::super::{Engine, Mode, Remote};
    use super::*;
    use crate::page_state::PageState;
    use memfold_swap::{
        Batch, BatchId, Page, Place, RemoteBackend, RemoteConfig, RemoteError, RemoteTier,
        RemoteUsage, Removal, TierKey,
    };
    use memfold_testing::Random;
    use std::collections::HashMap;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Barrier, Mutex};

    /// Set in a forked child, where a store's locks may be held by threads that are not there.
    static FORKED: AtomicBool = AtomicBool::new(false);

    /// A store that takes pages and returns them once the test lets it.
    #[derive(Clone, Default)]
    struct Held(Arc<Mutex<HashMap<Place, Vec<u8>>>>);

    impl RemoteBackend for Held {
        fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
            let mut records = lock(&self.0);
            for Batch { id, records: new } in batches {
                let place = |index| Place { batch: *id, index };
                records.extend((0..).map(place).zip(new.iter().cloned()));
            }
            batches.iter().map(|_| Ok(())).collect()
        }

        fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
            let records = lock(&self.0);
            let get = |place| Ok(records.get(place).cloned());
            places.iter().map(get).collect()
        }

        fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
            removals.iter().map(|_| Ok(())).collect()
        }

        fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
            batches.iter().map(|_| Ok(true)).collect()
        }

        fn now(&self) -> Duration {
            if FORKED.load(Ordering::Relaxed) {
                // SAFETY: ends a forked child.
                unsafe { libc::_exit(9) };
            }
            Duration::ZERO
        }

        fn sleep(&self, duration: Duration) {
            std::thread::sleep(duration);
        }
    }

    fn engine(store: &Held) -> Option<Engine> {
        let key = TierKey::new([3; 32]);
        let tier = RemoteTier::new(Box::new(store.clone()), &key, RemoteConfig::default());
        let remote = Remote {
            tier: Arc::new(tier),
            owner: Arc::new(()),
        };
        Engine::for_tests(Mode::Signal, Some(remote))
    }

    /// The threads that bring pages in need workers, as those that wait for the pages do.
    #[test]
    fn more_threads_than_workers_may_wait_for_the_store() {
        const PAGES: usize = (48 << 20) / PAGE_SIZE;
        let store = Held::default();
        let Some(engine) = engine(&store).map(Arc::new) else {
            return;
        };
        let region = Arc::new(engine.map(PAGES * PAGE_SIZE).unwrap());
        let mut random = Random::new(7);
        for page in 0..PAGES {
            let mut bytes: Page = [0; PAGE_SIZE];
            bytes.fill_with(|| random.next_word() as u8);
            // SAFETY: in the region, which no other thread uses.
            unsafe {
                let start = region.start().as_ptr().add(page * PAGE_SIZE);
                start.copy_from_nonoverlapping(bytes.as_ptr(), PAGE_SIZE);
            }
        }
        let area = region.area();
        let is_remote = |page: &usize| match area.entries()[*page].load() {
            PageState::Swapped(slot, _) => engine.state().is_remote(slot),
            _ => false,
        };
        let away: Vec<usize> = (0..PAGES).step_by(16).filter(is_remote).collect();
        let away = &away[..3 * WORKERS];
        let barrier = Arc::new(Barrier::new(away.len() + 1));
        let (done, pinned) = channel();
        let held = lock(&store.0);
        for page in away {
            let (region, barrier, done) = (region.clone(), barrier.clone(), done.clone());
            let start = page * PAGE_SIZE;
            std::thread::spawn(move || {
                barrier.wait();
                drop(region.pin(start..start + 1).unwrap());
                done.send(()).unwrap();
            });
        }
        barrier.wait();
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
        for _ in away {
            pinned.recv_timeout(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn a_forked_child_does_not_ask_the_store() {
        let Some(engine) = engine(&Held::default()) else {
            return;
        };
        let mut status = 0;
        // SAFETY: the child allocates nothing, takes no lock of the parent's and exits without destructors.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                FORKED.store(true, Ordering::Relaxed);
                let out = engine.stats().remote_pages_out;
                let usage = engine.remote_usage();
                libc::_exit(i32::from(out != 0 || usage != Some(RemoteUsage::default())));
            }
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        }
        assert_eq!(status, 0, "{status:#x}");
    }

    #[test]
    fn an_area_can_be_unmapped_while_room_is_made_for_its_pages() {
        let store = Held::default();
        let takes_none = lock(&store.0);
        let Some(engine) = engine(&store) else { return };
        let state = engine.state();
        let area = state.map(1 << 20).unwrap();
        // The pool takes more than its share, and nothing more may be resident.
        let mut random = Random::new(7);
        let mut scratch = Scratch::new();
        while state.space.pool_bytes() <= state.share().most {
            let mut page: Page = [0; PAGE_SIZE];
            page.fill_with(|| random.next_word() as u8);
            state.space.store(&page, &mut scratch).unwrap();
        }
        state.account.reserve_beyond(24 << 20);
        std::thread::scope(|scope| {
            let span = Advice::run(area.address(0), 1);
            let of_thread = &area;
            scope.spawn(move || state.bring_in_remote(of_thread, span));
            std::thread::sleep(Duration::from_millis(300));
            let began = Instant::now();
            state.unmap(&area);
            let waited = began.elapsed();
            drop(takes_none);
            assert!(waited < LONGEST_WAIT / 2, "{waited:?}");
        });
    }
}
