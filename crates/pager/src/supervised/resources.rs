//! What every address space of a group uses of it: the swap space, the counters, the room under the
//! limit, the reclaimer's wake-up. It knows no address space.

use crate::page::bytes;
use crate::pool_memory::MappedSource;
use crate::supervised::fork::shared_estimate::SharedPages;
use crate::supervised::latency::Histogram;
use crate::supervised::reclaim::priority::ReclaimerPriority;
use crate::supervised::stats::Counters;
use crate::supervised::util::tracers::SparedTracers;
use crate::sync::{Event, lock};
use memfold_swap::{Charge, Gather, GatherConfig, Slot, SlotRanges, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::guardian::Guardian;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Slots whose release may be pending, at most. More saves bulk frees, and keeps their pages in the pool
/// for longer.
const PENDING_FREES: usize = 1024;

/// What the address spaces of a group share. All of it is for any thread.
pub struct Resources {
    pub swap: Arc<SwapSpace<MappedSource>>,
    /// Releases slots that are given up many at a time.
    pub gather: Gather<MappedSource>,
    pub counters: Counters,
    /// Errors that the thread which met them dealt with.
    pub errors: AtomicU64,
    /// Latency of fault service.
    pub latency: Histogram,
    /// Pages counted in more than one process because a fork shares them.
    pub shared: Arc<SharedPages>,
    /// Kills programs without a helper when the supervisor dies.
    pub guardian: Guardian,
    /// When the supervisor started: the zero of coarse times.
    pub started: Instant,
    /// Scheduling priority of the reclaimer.
    pub priority: ReclaimerPriority,
    /// Tracers whose pages stay for a while.
    pub tracers: SparedTracers,
    /// A page read zeros where it was known to be resident; it is logged once.
    pub warned_zeroed: AtomicBool,
    /// A program is near `vm.max_map_count`; it is logged once.
    pub warned_mappings: AtomicBool,
    /// Bytes that may be resident, as of the last look at pool and metadata.
    resident_limit: AtomicU64,
    /// Slots of pages that were brought in. The reclaimer releases them: the handler has the CPU of the
    /// thread that faulted, which would wait.
    pending_frees: Mutex<Vec<Slot>>,
    reclaimer: Event,
}

/// Workers that release slots: one CPU is left to the programs. How many of them work follows the
/// backlog.
fn new_gather(swap: &Arc<SwapSpace<MappedSource>>) -> Gather<MappedSource> {
    use memfold_sys::thread;
    let cpus = thread::allowed_cpus();
    let config = GatherConfig {
        max_workers: cpus.len().saturating_sub(1).clamp(1, 8),
        ..GatherConfig::default()
    };
    Gather::with_worker_start(swap.clone(), config, move || {
        // A handler starts it, which is pinned where the program runs that is not to wait, and
        // goes before it. (Best effort: a worker there is a nuisance, not wrong.)
        let _ = thread::run_on(&cpus);
        thread::set_nice(5);
    })
}

impl Resources {
    pub fn new(swap: SwapSpace<MappedSource>) -> Resources {
        let swap = Arc::new(swap);
        Resources {
            gather: new_gather(&swap),
            swap,
            counters: Counters::default(),
            errors: AtomicU64::new(0),
            latency: Histogram::default(),
            shared: Arc::default(),
            guardian: Guardian::default(),
            started: Instant::now(),
            priority: ReclaimerPriority::default(),
            tracers: SparedTracers::default(),
            warned_zeroed: AtomicBool::new(false),
            warned_mappings: AtomicBool::new(false),
            resident_limit: AtomicU64::new(u64::MAX),
            pending_frees: Mutex::default(),
            reclaimer: Event::default(),
        }
    }

    /// Sets what the resident pages may come to, in bytes.
    pub fn set_resident_limit(&self, bytes: u64) {
        self.resident_limit.store(bytes, Ordering::Relaxed);
    }

    /// Milliseconds since the start.
    pub fn milliseconds(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Seconds since the start, coarse.
    pub fn seconds(&self) -> u32 {
        self.started.elapsed().as_secs() as u32
    }

    /// Resident anonymous bytes of all address spaces; pages shared by forks counted once.
    pub fn resident_bytes(&self) -> u64 {
        bytes(self.charged_pages().saturating_sub(self.shared.pages()))
    }

    /// Resident pages of all address spaces, those that forks share as often as they are.
    pub fn charged_pages(&self) -> u64 {
        self.swap.root_group().charged(Charge::Resident) / PAGE_SIZE as u64
    }

    /// Gives up the counts of slots whose pages are not wanted any more. Many are released by
    /// others, so that an exit or an `munmap` waits for none of it.
    pub fn release(&self, slots: SlotRanges) {
        self.gather.release(slots);
    }

    /// What the resident pages may come to, as of the last [`Resources::refresh_limit`].
    pub fn resident_limit_bytes(&self) -> u64 {
        self.resident_limit.load(Ordering::Relaxed)
    }

    /// Releases slots soon, or at once if many wait already: what they hold is counted still.
    pub fn defer_free(&self, slots: &[Slot]) {
        let mut pending = lock(&self.pending_frees);
        if pending.len() + slots.len() <= PENDING_FREES {
            pending.extend_from_slice(slots);
        } else {
            drop(pending);
            self.swap.release_bulk(slots);
        }
    }

    /// Releases what [`Resources::defer_free`] left.
    pub fn free_pending(&self) {
        let pending = std::mem::take(&mut *lock(&self.pending_frees));
        if !pending.is_empty() {
            self.swap.release_bulk(&pending);
        }
    }

    /// Makes the reclaimer look now.
    pub fn wake_reclaimer(&self) {
        self.reclaimer.notify();
    }

    /// The same where there is little room left.
    pub fn wake_reclaimer_under_pressure(&self) {
        self.priority.note_pressure();
        self.wake_reclaimer();
    }

    /// Waits for a call, at most `timeout`.
    pub fn wait_for_wake(&self, timeout: Duration) {
        self.reclaimer.wait(timeout);
    }
}
