//! What all address spaces of a group share: the swap space, the counters, the resident limit, the
//! reclaimer's wake-up. It refers to no address space.

use crate::page::bytes;
use crate::pool_memory::MappedSource;
use crate::supervised::fork::shared_estimate::SharedPages;
use crate::supervised::kernel::Guardian;
use crate::supervised::latency::Histogram;
use crate::supervised::reclaim::priority::{Pressure, ReclaimerPriority};
use crate::supervised::refaults::Refaults;
use crate::supervised::stats::Counters;
#[cfg(not(simulated))]
use crate::supervised::util::activity::Activity;
use crate::supervised::util::tracers::SparedTracers;
use crate::sync::{Event, Mutex, lock};
use crate::time::Instant;
use memfold_swap::{Charge, Gather, GatherConfig, Slot, SlotRanges, SwapSpace};
use memfold_sys::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Maximum number of slots whose release is pending. More makes fewer, larger frees and keeps pages in
/// the pool for longer.
const PENDING_FREES: usize = 1024;

/// What the address spaces of a group share. Any thread uses it; `pending_frees` has its own lock, and
/// atomics are counters and flags with Relaxed accesses.
pub(crate) struct Resources {
    /// The swap space of the whole run.
    pub swap: Arc<SwapSpace<MappedSource>>,
    /// Releases slots in bulk, on worker threads.
    pub gather: Gather<MappedSource>,
    /// The counted statistics.
    pub counters: Counters,
    /// Errors that were handled where they occurred.
    pub errors: AtomicU64,
    /// Latency of fault service.
    pub latency: Histogram,
    /// The part of it for pages that lay on other machines.
    pub remote_latency: Histogram,
    /// Distances between page-outs and swap-ins.
    pub refaults: Refaults,
    /// Estimate of the pages that forks share, and that are therefore charged more than once.
    pub shared: Arc<SharedPages>,
    /// Kills programs without a helper when the supervisor dies.
    pub guardian: Guardian,
    /// Start of the supervisor, the origin of all coarse times.
    pub started: Instant,
    /// Scheduling priority of the reclaimer.
    pub priority: ReclaimerPriority,
    /// Tracers whose pages reclaim spares for a while.
    pub tracers: SparedTracers,
    /// Forks are prepared by the programs' library, as the kernel does not report them.
    prepares_forks: AtomicBool,
    /// An address space may have ranges in `cow_broken` or `sibling_ranges`.
    is_any_listed: AtomicBool,
    /// Pages get to the stage by `mremap`, as the kernel has no `UFFDIO_MOVE`.
    carries: AtomicBool,
    /// See [`Resources::tracks_accesses`].
    tracks_accesses: AtomicBool,
    /// A zero-filled page that was known to be resident was logged.
    pub warned_zeroed: AtomicBool,
    /// A program near `vm.max_map_count` was logged.
    pub warned_mappings: AtomicBool,
    /// When descriptors were last missing for a program, in [`Self::milliseconds`] and one more; 0 if never.
    short_of_descriptors: AtomicU64,
    /// Resident pages of programs that have no helper as yet (`helper/late.rs`).
    waiting_pages: AtomicU64,
    /// Resident limit in bytes, as of the last
    /// [`Group::refresh_limit`](super::group::Group::refresh_limit).
    resident_limit: AtomicU64,
    /// Resident bytes to which each command under way has memory reclaimed.
    reclaim_requests: Mutex<Vec<u64>>,
    /// The least of them; `u64::MAX` without one.
    reclaim_target: AtomicU64,
    /// The same by proactive reclaim (`reclaim/proactive.rs`).
    proactive_target: AtomicU64,
    /// A command wants reclaim to search, though it may pause after a vain search.
    search_wanted: AtomicBool,
    /// Slots of pages that were swapped in. The reclaimer releases them, because the handler runs on
    /// the CPU of the faulting thread and would delay it.
    pending_frees: Mutex<Vec<Slot>>,
    /// Held while a handler charges a window for half of the room.
    pub window_turn: Mutex<()>,
    reclaimer: Event,
    /// Whether programs are served.
    #[cfg(not(simulated))]
    pub activity: Activity,
}

/// The gather with at most one worker fewer than CPUs, so that programs keep one. The number of active
/// workers follows the backlog.
fn new_gather(swap: &Arc<SwapSpace<MappedSource>>) -> Gather<MappedSource> {
    use memfold_sys::thread;
    let cpus = thread::allowed_cpus();
    let config = GatherConfig {
        max_workers: cpus.len().saturating_sub(1).clamp(1, 8),
        ..GatherConfig::default()
    };
    Gather::with_worker_start(swap.clone(), config, move || {
        // A worker inherits CPU affinity and priority from the handler that starts it, and would
        // compete with the faulting thread. Failure costs latency only.
        let _ = thread::run_on(&cpus);
        thread::set_nice(5);
    })
}

impl Resources {
    /// Resources around a swap space, without a resident limit.
    pub(crate) fn new(swap: SwapSpace<MappedSource>) -> Resources {
        let swap = Arc::new(swap);
        Resources {
            gather: new_gather(&swap),
            swap,
            counters: Counters::default(),
            errors: AtomicU64::new(0),
            latency: Histogram::default(),
            remote_latency: Histogram::default(),
            refaults: Refaults::default(),
            shared: Arc::default(),
            guardian: Guardian::default(),
            started: Instant::now(),
            priority: ReclaimerPriority::default(),
            tracers: SparedTracers::default(),
            prepares_forks: AtomicBool::new(false),
            is_any_listed: AtomicBool::default(),
            carries: AtomicBool::new(false),
            tracks_accesses: AtomicBool::new(false),
            warned_zeroed: AtomicBool::new(false),
            warned_mappings: AtomicBool::new(false),
            short_of_descriptors: AtomicU64::new(0),
            waiting_pages: AtomicU64::new(0),
            resident_limit: AtomicU64::new(u64::MAX),
            reclaim_requests: Mutex::default(),
            reclaim_target: AtomicU64::new(u64::MAX),
            proactive_target: AtomicU64::new(u64::MAX),
            search_wanted: AtomicBool::new(false),
            pending_frees: Mutex::default(),
            window_turn: Mutex::default(),
            reclaimer: Event::default(),
            #[cfg(not(simulated))]
            activity: Activity::default(),
        }
    }

    /// Whether forks are prepared (`fork/prepared.rs`) instead of reported.
    pub(crate) fn prepares_forks(&self) -> bool {
        self.prepares_forks.load(Ordering::Relaxed)
    }

    /// Has forks prepared. Called before the first program is admitted.
    pub(crate) fn prepare_forks(&self) {
        self.prepares_forks.store(true, Ordering::Relaxed);
    }

    /// Whether helpers carry pages off by `mremap` (`reclaim/batch/carried.rs`), as the kernel has no `UFFDIO_MOVE`.
    pub(crate) fn carries(&self) -> bool {
        self.carries.load(Ordering::Relaxed)
    }

    /// Has helpers carry pages off. Called before the first program is admitted.
    pub(crate) fn carry(&self) {
        self.carries.store(true, Ordering::Relaxed);
    }

    /// Whether accesses are tracked (`reclaim/accesses.rs`). Tracked memory cannot be write-protected.
    pub(crate) fn tracks_accesses(&self) -> bool {
        self.tracks_accesses.load(Ordering::Relaxed)
    }

    /// Turns access tracking on. Called before the first program is admitted.
    pub(crate) fn track_accesses(&self) {
        self.tracks_accesses.store(true, Ordering::Relaxed);
    }

    /// Sets the resident limit in bytes.
    pub(crate) fn set_resident_limit(&self, bytes: u64) {
        self.resident_limit.store(bytes, Ordering::Relaxed);
    }

    /// Milliseconds since the supervisor's start.
    pub(crate) fn milliseconds(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// A program could not be let in for want of descriptors.
    pub(crate) fn note_shortage(&self) {
        let now = self.milliseconds() + 1;
        self.short_of_descriptors.store(now, Ordering::Relaxed);
    }

    /// Whether descriptors were missing for a program within this time.
    pub(crate) fn was_short(&self, within: Duration) -> bool {
        let last = self.short_of_descriptors.load(Ordering::Relaxed);
        last != 0 && self.milliseconds() < last + within.as_millis() as u64
    }

    /// Seconds since the supervisor's start, rounded down.
    pub(crate) fn seconds(&self) -> u32 {
        self.seconds_at(Instant::now())
    }

    /// The same at a time.
    pub(crate) fn seconds_at(&self, now: Instant) -> u32 {
        now.duration_since(self.started).as_secs() as u32
    }

    /// Notes the resident pages of programs that have no helper as yet.
    #[cfg(not(simulated))]
    pub(crate) fn set_waiting_pages(&self, pages: u64) {
        if self.waiting_pages.swap(pages, Ordering::Relaxed) < pages {
            self.activity.note();
        }
    }

    /// Resident anonymous bytes of all programs. Pages shared by forks count once.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let waiting = self.waiting_pages.load(Ordering::Relaxed);
        bytes(self.charged_pages().saturating_sub(self.shared.pages()) + waiting)
    }

    /// The least that the resident pages may be, in bytes: forks may share more than is known between two
    /// counts. For what is reported; reclaim uses [`Resources::resident_bytes`].
    pub(crate) fn least_resident_bytes(&self) -> u64 {
        let waiting = self.waiting_pages.load(Ordering::Relaxed);
        bytes(self.charged_pages().saturating_sub(self.shared.most()) + waiting)
    }

    /// Sum of the resident pages of all address spaces. Pages shared by forks count once per address
    /// space.
    pub(crate) fn charged_pages(&self) -> u64 {
        self.swap.root_group().charged(Charge::Resident) / PAGE_SIZE as u64
    }

    /// Drops one reference of each slot. Large numbers are left to worker threads, so that an exit or
    /// munmap does not wait.
    pub(crate) fn release(&self, slots: SlotRanges) {
        self.gather.release(slots);
    }

    /// The resident limit in bytes.
    pub(crate) fn resident_limit_bytes(&self) -> u64 {
        self.resident_limit.load(Ordering::Relaxed)
    }

    /// Has memory reclaimed down to so many resident bytes, whatever the limit is, until the request is dropped. Of
    /// several requests the lowest target holds.
    pub(crate) fn request_reclaim(&self, target: u64) -> ReclaimRequest<'_> {
        self.change_reclaim_requests(|requests| requests.push(target));
        let resources = self;
        ReclaimRequest { resources, target }
    }

    fn change_reclaim_requests(&self, change: impl FnOnce(&mut Vec<u64>)) {
        let mut requests = lock(&self.reclaim_requests);
        change(&mut requests);
        let least = requests.iter().min().copied().unwrap_or(u64::MAX);
        // Under the lock: an older minimum must not replace it.
        self.reclaim_target.store(least, Ordering::Relaxed);
        drop(requests);
        self.want_search();
        self.wake_reclaimer();
    }

    /// Has reclaim search at once, whatever its last search found.
    pub(crate) fn want_search(&self) {
        self.search_wanted.store(true, Ordering::Relaxed);
    }

    /// Whether [`Resources::want_search`] was called since the last call of this.
    pub(crate) fn take_search_wanted(&self) -> bool {
        self.search_wanted.swap(false, Ordering::Relaxed)
    }

    /// Sets the resident bytes down to which what is cold may leave, whatever the limit is; `None`: no longer.
    #[cfg(not(simulated))]
    pub(crate) fn set_proactive_target(&self, target: Option<u64>) {
        self.proactive_target
            .store(target.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Resident bytes down to which memory is to be reclaimed below the limit, by a command or proactively.
    pub(crate) fn reclaim_target(&self) -> Option<u64> {
        let proactive = self.proactive_target.load(Ordering::Relaxed);
        let target = self.reclaim_target.load(Ordering::Relaxed).min(proactive);
        (target != u64::MAX).then_some(target)
    }

    /// Whether a command has memory reclaimed: it is waited for.
    pub(crate) fn is_reclaim_awaited(&self) -> bool {
        self.reclaim_target.load(Ordering::Relaxed) != u64::MAX
    }

    /// Notes how long a fault waited.
    pub(crate) fn note_wait(&self, first_touch: bool, waited: Duration) {
        let counter = if first_touch {
            &self.counters.first_touch_wait_ns
        } else {
            &self.counters.swap_in_wait_ns
        };
        counter.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Leaves the release of slots to the reclaimer, or releases them at once if too many are pending:
    /// their pages still occupy the pool.
    pub(crate) fn defer_free(&self, slots: &[Slot]) {
        let mut pending = lock(&self.pending_frees);
        if pending.len() + slots.len() <= PENDING_FREES {
            pending.extend_from_slice(slots);
        } else {
            drop(pending);
            self.swap.release_bulk(slots);
        }
    }

    /// Releases the slots that [`Resources::defer_free`] left.
    pub(crate) fn free_pending(&self) {
        let pending = std::mem::take(&mut *lock(&self.pending_frees));
        if !pending.is_empty() {
            self.swap.release_bulk(&pending);
        }
    }

    /// Wakes the reclaimer.
    pub(crate) fn wake_reclaimer(&self) {
        self.reclaimer.notify();
    }

    /// Wakes the reclaimer and raises its priority, where little room is left.
    pub(crate) fn wake_reclaimer_under_pressure(&self) {
        self.priority.raise_pressure(Pressure::Short);
        self.wake_reclaimer();
    }

    /// Number of programs that have come so far.
    pub(crate) fn programs_come(&self) -> u64 {
        self.counters.processes.load(Ordering::Relaxed)
    }

    /// A range was added to `cow_broken` or `sibling_ranges` of an address space.
    pub(crate) fn note_listed(&self) {
        // Release: the thread that takes this finds the range.
        self.is_any_listed.store(true, Ordering::Release);
    }

    /// Whether any may have been since the last call.
    pub(crate) fn take_listed(&self) -> bool {
        self.is_any_listed.swap(false, Ordering::Acquire)
    }

    /// Waits for [`Resources::wake_reclaimer`], at most `timeout`.
    pub(crate) fn wait_for_wake(&self, timeout: Duration) {
        self.reclaimer.wait(timeout);
    }
}

/// A command that has memory reclaimed ([`Resources::request_reclaim`]).
pub(crate) struct ReclaimRequest<'a> {
    resources: &'a Resources,
    target: u64,
}

impl Drop for ReclaimRequest<'_> {
    fn drop(&mut self) {
        self.resources.change_reclaim_requests(|requests| {
            if let Some(own) = requests.iter().position(|target| *target == self.target) {
                requests.swap_remove(own);
            }
        });
    }
}

#[cfg(all(test, not(simulated)))]
mod tests {
    use super::*;
    use memfold_swap::SwapConfig;

    #[test]
    fn a_request_that_ends_leaves_the_others() {
        let space = SwapSpace::new(MappedSource::default(), SwapConfig::default());
        let resources = Resources::new(space.expect("a swap space"));
        let low = resources.request_reclaim(50);
        let high = resources.request_reclaim(199);
        let again = resources.request_reclaim(50);
        drop(high);
        assert_eq!(resources.reclaim_target(), Some(50));
        drop(again);
        assert_eq!(resources.reclaim_target(), Some(50));
        drop(low);
        assert_eq!(resources.reclaim_target(), None);
        assert!(!resources.is_reclaim_awaited());
    }
}
