//! Compressing cold blocks together with their neighbours, in the background and where a write finds no room.
//!
//! A *pass* looks at all slots. What was neither written nor read for a whole pass is cold, and moves into
//! blocks of the swap space, which take a part of what single pages take. Each read of one decompresses all
//! of its pages, so what is read again soon is stored alone again (`Disk::unpack`).

use crate::sync::{self, unpoisoned};
use memfold_swap::{ScanPolicy, Scratch, SwapSpace, Usage};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zsmalloc::PageSource;

/// Slots of a step. More makes fewer steps, and delays requests that need the CPU.
const STEP_SLOTS: usize = 512;
/// Above this part of the limit passes are ten times as frequent. A larger number begins earlier.
const PRESSED_PART: u64 = 4;
/// The least time between two passes.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);
/// First and longest pause after a step during which others wanted the CPU. Longer takes less from them,
/// and leaves the disk large where CPUs are never idle.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(640);
/// Gaps in the pool, as a part of it and at least in bytes, from which on it is compacted. More takes less
/// time, and more memory during a pass.
const WASTE_PART: u64 = 32;
const WASTE_BYTES: u64 = 1 << 20;
/// Pages stored or freed after a search for room was in vain, before the next one. More spares CPU time
/// where there is no room, and finds what there is later.
const RETRY_PAGES: u64 = 1024;
/// Bytes of freed pages in blocks after which there is a next one, too: enough for any request.
const RETRY_BYTES: u64 = 1 << 16;

/// What a thread that packs asks of its host.
pub trait Host: Send + 'static {
    /// Called in the thread before all else.
    fn begin(&mut self) {}

    /// Whether CPUs had little else to do since the last call. `None` if the host cannot tell: the thread
    /// ends then.
    fn is_idle(&mut self) -> Option<bool>;
}

struct Shared<S: PageSource> {
    space: Arc<SwapSpace<S>>,
    limit: u64,
    /// Requests that needed room, and those of them that found none.
    wanted: AtomicU64,
    refused: AtomicU64,
    stopping: AtomicBool,
    /// Guards no data: what stops the thread is told under it.
    lock: Mutex<()>,
    stopped: Condvar,
}

/// The thread. Dropping it stops it.
pub(crate) struct Packer<S: PageSource + 'static> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

impl<S: PageSource + 'static> Packer<S> {
    /// Starts the thread. A block is cold after one `period`, and until the end of the next.
    pub(crate) fn start(
        space: Arc<SwapSpace<S>>,
        limit: u64,
        period: Duration,
        host: impl Host,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            space,
            limit,
            wanted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            lock: Mutex::new(()),
            stopped: Condvar::new(),
        });
        let its = shared.clone();
        let builder = std::thread::Builder::new().name("memfold-pack".to_owned());
        let thread = builder.spawn(move || its.run(period, host))?;
        Ok(Packer {
            shared,
            thread: Some(thread),
        })
    }

    /// Notes that a request needs room, which its thread makes meanwhile.
    pub(crate) fn note_wanted(&self) {
        self.shared.wanted.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a request found no room.
    pub(crate) fn note_refused(&self) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
    }
}

impl<S: PageSource + 'static> Drop for Packer<S> {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        drop(self.shared.lock());
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics only where the swap space finds a bug, and has reported it.
            let _ = thread.join();
        }
    }
}

impl<S: PageSource + 'static> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, ()> {
        sync::lock(&self.lock)
    }

    /// Waits, or until the disk is dropped. Whether it goes on.
    fn pause(&self, time: Duration) -> bool {
        let goes_on = |(): &mut ()| !self.stopping.load(Ordering::Relaxed);
        let waited = self.stopped.wait_timeout_while(self.lock(), time, goes_on);
        drop(unpoisoned(waited));
        !self.stopping.load(Ordering::Relaxed)
    }

    fn is_pressed(&self) -> bool {
        let used = self.space.pool_bytes() + self.space.metadata_bytes();
        used > self.limit - self.limit / PRESSED_PART
    }

    /// Bytes of gaps in the pool. What dead blocks take beside others, compaction does not give back.
    fn waste(&self) -> u64 {
        let used = self.space.root_group().usage().pool + self.space.dead_bytes();
        self.space.pool_bytes().saturating_sub(used)
    }

    fn compact(&self) {
        let goes_on = || !self.stopping.load(Ordering::Relaxed);
        self.space.compact(goes_on);
        self.space.trim();
    }

    fn run(&self, period: Duration, mut host: impl Host) {
        host.begin();
        let mut scratch = Scratch::new();
        let mut passes = Passes::default();
        let short = (period / 10).max(SHORTEST_PERIOD);
        loop {
            // A period that has begun ends early under pressure.
            let began = Instant::now();
            while began.elapsed() < period && !(self.is_pressed() && began.elapsed() >= short) {
                if !self.pause(short) {
                    return;
                }
            }
            let usage = self.space.usage();
            let refused = self.refused.load(Ordering::Relaxed);
            if passes.is_due(changes(&usage) + usage.pages_loaded_total + refused) {
                let Some(moved) = self.pass(&mut host, &mut scratch) else {
                    return;
                };
                passes.note(moved);
            }
        }
    }

    /// A pass over all slots. Returns the pages that moved; `None` if the thread ends.
    fn pass(&self, host: &mut impl Host, scratch: &mut Scratch) -> Option<u64> {
        let policy = ScanPolicy {
            recompress: Some(1),
            write_back: None,
        };
        let (mut moved, mut pause) = (0, FIRST_PAUSE);
        // What compaction cannot give back is not tried again and again.
        let mut least_waste = 0;
        host.is_idle()?;
        let mut wanted = self.wanted.load(Ordering::Relaxed);
        loop {
            let report = self.space.scan(policy, STEP_SLOTS, scratch);
            moved += report.moved;
            if self.waste() > least_waste + (self.space.pool_bytes() / WASTE_PART).max(WASTE_BYTES)
            {
                self.compact();
                least_waste = self.waste();
            }
            if report.finished || self.stopping.load(Ordering::Relaxed) {
                break;
            }
            // Who makes room needs what a step keeps from others.
            let wanted_before = std::mem::replace(&mut wanted, self.wanted.load(Ordering::Relaxed));
            if host.is_idle()? && wanted == wanted_before {
                pause = FIRST_PAUSE;
            } else if self.pause(pause) {
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
        if moved > 0 {
            self.compact();
        }
        (!self.stopping.load(Ordering::Relaxed)).then_some(moved)
    }
}

/// Pages stored and freed so far.
fn changes(usage: &Usage) -> u64 {
    let stored = usage.pages_stored_total;
    // The counters are read one after the other.
    stored + stored.saturating_sub(usage.stored_pages)
}

/// Which passes are due: until nothing is left to move, an idle disk is looked at no more.
#[derive(Debug, Default)]
struct Passes {
    /// Stores, loads, frees and requests without room at the start of the last pass.
    requests: u64,
    /// Passes since then of which none moved a page.
    in_vain: u32,
}

impl Passes {
    /// Whether a pass is due after `requests` requests.
    fn is_due(&mut self, requests: u64) -> bool {
        // The first pass after a request makes blocks old, the second moves them.
        if requests == self.requests {
            return self.in_vain < 2;
        }
        (self.requests, self.in_vain) = (requests, 0);
        true
    }

    fn note(&mut self, moved: u64) {
        self.in_vain = if moved == 0 { self.in_vain + 1 } else { 0 };
    }
}

/// Where a write finds no room: packing in the thread that writes.
#[derive(Debug, Default)]
pub(crate) struct RoomFinder {
    in_vain: Mutex<Option<InVain>>,
}

/// What there was when a search found nothing. Before that changes, another finds nothing either.
#[derive(Debug, Clone, Copy)]
struct InVain {
    changes: u64,
    /// Bytes of freed pages in blocks, at the least since then.
    dead: u64,
}

impl InVain {
    fn at(usage: &Usage) -> InVain {
        InVain {
            changes: changes(usage),
            dead: usage.dead_bytes,
        }
    }

    /// Whether a search is worth it again.
    fn is_over(&mut self, usage: &Usage) -> bool {
        self.dead = self.dead.min(usage.dead_bytes);
        // A full disk stores nothing, but discards leave blocks that can be taken apart.
        changes(usage) >= self.changes + RETRY_PAGES || usage.dead_bytes >= self.dead + RETRY_BYTES
    }
}

impl RoomFinder {
    /// Moves what is cold, or else what is not, into blocks until there is room. Whether there is.
    pub(crate) fn find<S: PageSource>(
        &self,
        space: &SwapSpace<S>,
        scratch: &mut Scratch,
        has_room: impl Fn() -> bool,
    ) -> bool {
        // Others wait for the room that one thread makes.
        let mut in_vain = sync::lock(&self.in_vain);
        if has_room() {
            return true;
        }
        if let Some(last) = in_vain.as_mut()
            && !last.is_over(&space.usage())
        {
            return false;
        }
        // One revolution makes all old, the next moves it; the first of three was begun elsewhere.
        let mut revolutions = 0;
        while revolutions < 3 {
            let report = space.scan_for_room(STEP_SLOTS, scratch);
            revolutions += u32::from(report.finished);
            if report.moved > 0 {
                space.trim_spare();
            }
            if has_room() {
                *in_vain = None;
                return true;
            }
        }
        space.compact(|| true);
        space.trim();
        let found = has_room();
        *in_vain = (!found).then(|| InVain::at(&space.usage()));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_disk_is_left_alone_once_nothing_moves() {
        let mut passes = Passes::default();
        assert!(passes.is_due(7));
        passes.note(0);
        assert!(passes.is_due(7), "blocks are old only after a pass");
        passes.note(300);
        for _ in 0..2 {
            assert!(passes.is_due(7));
            passes.note(0);
        }
        assert!(!passes.is_due(7));
        assert!(passes.is_due(8));
    }
}
