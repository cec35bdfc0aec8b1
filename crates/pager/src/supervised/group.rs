//! A group: the address spaces under one limit, the swap space they share, and the counters.

use crate::backoff::{CompressionPolicy, LimitRelief};
use crate::options::{Floor, Limit};
use crate::page::bytes;
use crate::pool_memory::MappedSource;
use crate::supervised::comfort::Measured;
use crate::supervised::fault::deferred::Deferred;
use crate::supervised::fault::remote::RemoteFaults;
use crate::supervised::floor::Stored;
use crate::supervised::fork::expected_children::ExpectedChildren;
#[cfg(not(simulated))]
use crate::supervised::helper::released::Released;
use crate::supervised::limit_state::{Excess, LimitState};
use crate::supervised::resources::Resources;
use crate::supervised::space::AddressSpace;
use crate::supervised::stats::{Now, ProgramUsage, Stats, Totals};
use crate::sync::{Event, Mutex, RwLock};
use crate::time::Instant;
use memfold_swap::{Charge, FileTier, RemoteTier, SwapSpace};
use memfold_sys::PAGE_SIZE;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Time for which the limit must be exceeded without a break before that is warned of. Shorter warns of what
/// reclaim is about to remove.
const WARN_AFTER: Duration = Duration::from_millis(50);

/// Divisor of the resident limit: this part of it stays available to managed memory, whatever memory
/// cannot be managed. A larger divisor exceeds the limit by less and makes managed memory thrash more.
const MANAGED_DIVISOR: u64 = 2;

/// The same for evictable memory, beside read-only and locked mappings and children without a helper.
const EVICTABLE_DIVISOR: u64 = 4;

/// Where pages leave the pool for.
#[derive(Default)]
pub(crate) struct Outlets {
    /// The swap file, if there is one.
    pub file: Option<Arc<FileTier>>,
    /// The store on other machines, if there is one.
    pub remote: Option<Arc<RemoteTier>>,
}

/// A store on other machines, and the faults that wait for it.
pub(crate) struct Remote {
    /// The tier.
    pub tier: Arc<RemoteTier>,
    /// Faults on its pages.
    pub faults: RemoteFaults<AddressSpace>,
}

/// The programs under one limit. All threads of the supervisor share it.
///
/// `spaces` has its own lock. Atomics are flags, counters and times that only steer the threads, so
/// their accesses are Relaxed.
pub(crate) struct Group {
    /// What the address spaces use, too.
    pub resources: Arc<Resources>,
    limit: LimitState,
    floor: Floor,
    /// The swap file, if there is one.
    pub file: Option<Arc<FileTier>>,
    /// The store on other machines, if there is one.
    pub remote: Option<Remote>,
    /// Time of the last scan that found unmanaged mappings, in milliseconds since the supervisor's
    /// start.
    pub found_mappings: AtomicU64,
    spaces: RwLock<BTreeMap<u64, Arc<AddressSpace>>>,
    next_id: AtomicU64,
    /// Children of prepared forks.
    pub expected_children: ExpectedChildren<AddressSpace>,
    /// Serializes searches for the process of a forked child.
    pub child_search: Mutex<()>,
    /// Processes that were let go.
    #[cfg(not(simulated))]
    pub released: Released,
    relief: LimitRelief,
    /// Whether storing a page frees memory.
    pub compression: CompressionPolicy,
    /// Resident pages that the kernel refuses to register, such as those with a userfaultfd of the
    /// program.
    pub refused_pages: AtomicU64,
    /// Pages brought back for tracers. They are added to the limit while the tracers hold their
    /// programs.
    pub held_pages: AtomicU64,
    /// Faults that wait for room.
    pub deferred: Deferred<AddressSpace>,
    sharing: Event,
    /// Wakes the background thread.
    pub background: Event,
    /// Set once, at the end: all threads exit.
    pub stopping: AtomicBool,
    /// Nanoseconds for which the limit has been exceeded without a break.
    exceeded_for: AtomicU64,
    warned_held: AtomicBool,
    /// A failed write to the swap file was logged.
    pub warned_file: AtomicBool,
    /// End of the pause after a failed write to the swap file, in milliseconds since the start.
    pub file_paused_until: AtomicU64,
    /// Serializes [`Group::swap_off`].
    pub swapping_off: Mutex<()>,
}

/// Bytes of a group's memory.
#[derive(Clone, Copy)]
struct Sizes {
    resident: u64,
    pool: u64,
    /// All that counts towards the limit.
    total: u64,
}

impl Group {
    /// A group without programs.
    pub(crate) fn new(
        (limit, floor): (Limit, Floor),
        swap: SwapSpace<MappedSource>,
        outlets: Outlets,
    ) -> Group {
        let remote = outlets.remote.map(|tier| Remote {
            tier,
            faults: RemoteFaults::default(),
        });
        Group {
            resources: Arc::new(Resources::new(swap)),
            limit: LimitState::new(limit),
            floor,
            compression: CompressionPolicy::new(limit),
            file: outlets.file,
            remote,
            found_mappings: AtomicU64::new(0),
            spaces: RwLock::default(),
            next_id: AtomicU64::new(1),
            expected_children: ExpectedChildren::default(),
            child_search: Mutex::default(),
            #[cfg(not(simulated))]
            released: Released::default(),
            relief: LimitRelief::new(Instant::now()),
            refused_pages: AtomicU64::new(0),
            held_pages: AtomicU64::new(0),
            deferred: Deferred::default(),
            sharing: Event::default(),
            background: Event::default(),
            stopping: AtomicBool::new(false),
            exceeded_for: AtomicU64::new(0),
            warned_held: AtomicBool::new(false),
            warned_file: AtomicBool::new(false),
            file_paused_until: AtomicU64::new(0),
            swapping_off: Mutex::default(),
        }
    }

    /// The limit in force.
    pub(crate) fn limit(&self) -> Limit {
        self.limit.get()
    }

    /// Changes the limit while programs run.
    pub(crate) fn set_limit(&self, limit: Limit) {
        self.limit.set(limit, self.resources.milliseconds());
        self.compression.set_limit(limit);
        self.refresh_limit();
        // What was small or far enough from the limit may have to be registered now.
        #[cfg(not(simulated))]
        self.resources.activity.note();
        self.resources.want_search();
        self.resources.wake_reclaimer_under_pressure();
    }

    /// An ID for a new address space.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The address space with this ID.
    pub(crate) fn space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.get(&id).cloned())
    }

    /// All address spaces at this moment.
    pub(crate) fn spaces(&self) -> Vec<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.values().cloned().collect())
    }

    /// Number of address spaces.
    pub(crate) fn space_count(&self) -> usize {
        self.read_spaces(BTreeMap::len)
    }

    fn read_spaces<R>(&self, read: impl FnOnce(&BTreeMap<u64, Arc<AddressSpace>>) -> R) -> R {
        read(
            &self
                .spaces
                .read()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        )
    }

    /// Adds an address space and counts a program.
    pub(crate) fn add_space(&self, space: Arc<AddressSpace>) {
        self.resources
            .counters
            .processes
            .fetch_add(1, Ordering::Relaxed);
        let mut spaces = self
            .spaces
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        spaces.insert(space.id, space);
        drop(spaces);
        // Relatives may have listed ranges of it before.
        self.resources.note_listed();
        // It grows without a message until it is managed.
        #[cfg(not(simulated))]
        self.resources.activity.note();
    }

    /// Forgets an address space that no process came to.
    pub(crate) fn dismiss(&self, space: &AddressSpace) {
        space.life.die();
        space.leave();
        self.remove_space(space.id);
    }

    /// Removes an address space, which lives on until its last reference is dropped.
    pub(crate) fn remove_space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.spaces
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .remove(&id)
    }

    /// Bytes of the swap tables and of all page tables.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let tables: u64 =
            self.read_spaces(|spaces| spaces.values().map(|space| space.metadata_bytes()).sum());
        self.resources.swap.metadata_bytes() + tables
    }

    /// Recomputes the resident limit from the limit, the pool, metadata and allowances above the limit.
    pub(crate) fn refresh_limit(&self) {
        let configured = self.limit();
        let by_total = configured.total_bytes.map_or(u64::MAX, |total| {
            self.stored(total)
                .resident_limit(self.floor, || self.needed_bytes())
        });
        let limit = by_total.min(configured.resident_bytes.unwrap_or(u64::MAX));
        // Without this, memory that cannot be managed would leave managed memory almost no room, and
        // unevictable pages the evictable ones.
        let beside = |pages: u64, divisor: u64| match pages {
            0 => limit,
            pages => limit.max(bytes(pages) + limit / divisor),
        };
        let limit = beside(self.refused_pages.load(Ordering::Relaxed), MANAGED_DIVISOR)
            .max(beside(self.unevictable_pages(), EVICTABLE_DIVISOR));
        let relief = self.relief.bytes(Instant::now());
        let held = bytes(self.held_pages.load(Ordering::Relaxed));
        self.resources
            .set_resident_limit(limit.max(relief).saturating_add(held));
    }

    /// What is out, under a limit on all memory.
    fn stored(&self, limit: u64) -> Stored {
        Stored {
            limit,
            bytes: self.resources.swap.pool_bytes() + self.metadata_bytes(),
        }
    }

    /// Bytes that the programs use, resident and out.
    fn needed_bytes(&self) -> u64 {
        self.resources.resident_bytes() + self.out_bytes()
    }

    /// Bytes of the programs that are out, uncompressed.
    fn out_bytes(&self) -> u64 {
        bytes(self.resources.swap.usage().slots_in_use)
    }

    /// Resident pages that are not evictable, in programs with unevictable mappings or without a helper. Pages that forks
    /// share may all be among them, and count once at most.
    fn unevictable_pages(&self) -> u64 {
        let found = |space: &Arc<AddressSpace>| space.unevictable_pages();
        let found: u64 = self.read_spaces(|spaces| spaces.values().map(found).sum());
        found.saturating_sub(self.resources.shared.pages())
    }

    /// Requests a count of the pages that forks share.
    pub(crate) fn count_sharing(&self) {
        self.sharing.notify();
    }

    /// Waits for [`Group::count_sharing`], at most `timeout`. Returns whether a count was requested.
    pub(crate) fn wait_for_sharing(&self, timeout: Duration) -> bool {
        self.sharing.wait(timeout)
    }

    /// Updates the peak statistics from the current sizes.
    pub(crate) fn note_peaks(&self) {
        let sizes = self.sizes();
        let file = self.resources.swap.root_group().charged(Charge::File);
        let remote = self.resources.swap.root_group().charged(Charge::Remote);
        let counters = &self.resources.counters;
        counters
            .peak_remote_bytes
            .fetch_max(remote, Ordering::Relaxed);
        counters
            .peak_resident_bytes
            .fetch_max(sizes.resident, Ordering::Relaxed);
        counters
            .peak_pool_bytes
            .fetch_max(sizes.pool, Ordering::Relaxed);
        counters.peak_file_bytes.fetch_max(file, Ordering::Relaxed);
        let tables = self.resources.swap.table_bytes();
        if tables
            > counters
                .peak_table_bytes
                .fetch_max(tables, Ordering::Relaxed)
        {
            let slots = self.resources.swap.usage().slots_in_use;
            counters.peak_table_slots.store(slots, Ordering::Relaxed);
        }
        counters
            .peak_total_bytes
            .fetch_max(sizes.total, Ordering::Relaxed);
        let excess = self.excess(sizes);
        self.limit.note(excess);
        counters
            .over_limit_pages
            .fetch_max(excess.bytes / PAGE_SIZE as u64, Ordering::Relaxed);
    }

    /// The resident limit, or what the total one leaves where that is less; not what reclaim aims at for a moment, as
    /// memory cannot be paged out.
    fn resident_limit_in_force(&self) -> u64 {
        let aimed_at = self.resources.resident_limit_bytes();
        let given = self.limit().resident_bytes;
        given.map_or(aimed_at, |given| given.min(aimed_at))
    }

    /// How far the group is above its limit.
    fn excess(&self, sizes: Sizes) -> Excess {
        let now = self.resources.milliseconds();
        self.limit.excess(sizes.resident, sizes.total, now)
    }

    /// The sizes now: the least they may be.
    fn sizes(&self) -> Sizes {
        let resident = self.resources.least_resident_bytes();
        let pool = self.resources.swap.pool_bytes();
        Sizes {
            resident,
            pool,
            total: resident + pool + self.metadata_bytes(),
        }
    }

    /// Notes for how long the limit is exceeded, after so much more time, and what the programs need.
    /// Called by the governor.
    pub(crate) fn watch_limit(&self, elapsed: Duration) {
        let sizes = self.sizes();
        let counters = &self.resources.counters;
        let excess = self.excess(sizes);
        if excess.is_reported() {
            let elapsed = elapsed.as_nanos() as u64;
            counters.over_limit_ns.fetch_add(elapsed, Ordering::Relaxed);
            let lasts = self.exceeded_for.fetch_add(elapsed, Ordering::Relaxed) + elapsed;
            if lasts >= WARN_AFTER.as_nanos() as u64 {
                self.warn_over_limit(excess, || self.cause_of_excess());
            }
        } else {
            self.exceeded_for.store(0, Ordering::Relaxed);
        }
        counters
            .peak_needed_bytes
            .fetch_max(sizes.resident + self.out_bytes(), Ordering::Relaxed);
        counters
            .peak_mapped_bytes
            .fetch_max(self.mapped_bytes(), Ordering::Relaxed);
    }

    /// Resident memory of the programs that is file-backed or shared.
    fn mapped_bytes(&self) -> u64 {
        let shared = |space: &Arc<AddressSpace>| {
            let pages = space.sampling.shared.load(Ordering::Relaxed);
            if space.has_left() { 0 } else { bytes(pages) }
        };
        self.read_spaces(|spaces| spaces.values().map(shared).sum())
    }

    /// Why a limit is exceeded for a while though memory is paged out.
    fn cause_of_excess(&self) -> String {
        let stored = self.limit().total_bytes.map(|limit| self.stored(limit));
        let Some(stored) = stored.filter(|stored| stored.beyond() > 0) else {
            return "programs allocate faster than memory can be paged out, or it cannot be"
                .to_owned();
        };
        let now = self.measured(self.needed_bytes(), Duration::ZERO);
        let held = now.and_then(|now| self.held_limit_by(now));
        let advice = held.map_or_else(String::new, |held| {
            format!(
                "; a limit of {} MiB would be held now",
                held.div_ceil(1 << 20)
            )
        });
        format!(
            "what is out takes {} MiB compressed, and up to {} of what the programs use stays resident \
             (--floor){advice}",
            stored.bytes >> 20,
            self.floor,
        )
    }

    fn warn_over_limit(&self, excess: Excess, cause: impl FnOnce() -> String) {
        if self.limit.may_warn(excess) {
            let cause = cause();
            log::warn!(
                "the limit is exceeded by {} MiB (of {} MiB): {cause}; the programs run on, and the total \
                 follows at the end (reported once; see memfold stat, and memfold limit to raise it)",
                excess.bytes >> 20,
                excess.limit >> 20,
            );
        }
    }

    /// The limit under which programs that took so much CPU time would spend little time on swapping;
    /// `None` if they do under this one.
    pub(crate) fn comfortable_limit(&self, cpu: Duration) -> Option<u64> {
        let remaining = |more: u64| self.resources.refaults.remaining(more / PAGE_SIZE as u64);
        self.measured_at_peak(cpu)?.comfortable_limit(remaining)
    }

    /// The least limit that would have been held; `None` where this one would be, or where pages can leave memory.
    pub(crate) fn held_limit(&self) -> Option<u64> {
        self.held_limit_by(self.measured_at_peak(Duration::ZERO)?)
    }

    fn held_limit_by(&self, measured: Measured) -> Option<u64> {
        let is_all_in_memory = self.file.is_none() && self.remote.is_none();
        measured.held_limit(self.floor).filter(|_| is_all_in_memory)
    }

    fn measured_at_peak(&self, cpu: Duration) -> Option<Measured> {
        let needed = &self.resources.counters.peak_needed_bytes;
        self.measured(needed.load(Ordering::Relaxed), cpu)
    }

    /// What was measured under the limit of programs that need so many bytes.
    fn measured(&self, needed: u64, cpu: Duration) -> Option<Measured> {
        let limit = self.limit();
        let totals = self.resources.counters.totals();
        let usage = self.resources.swap.usage();
        Some(Measured {
            limit: limit.total_bytes.or(limit.resident_bytes)?,
            pool_counts: limit.total_bytes.is_some(),
            needed,
            density: usage.bytes_stored_total as f64 / usage.bytes_original_total.max(1) as f64,
            cpu_ns: cpu.as_nanos() as u64,
            swap_in_wait_ns: totals.swap_in_wait_ns,
            first_touch_wait_ns: totals.first_touch_wait_ns,
        })
    }

    /// Raises the limit to the resident size for a while, because nothing more can be reclaimed.
    pub(crate) fn relax_limit(&self) {
        self.relief
            .relax(self.resources.resident_bytes(), Instant::now());
        self.refresh_limit();
    }

    /// Notes that reclaim cannot bring the group under its limit; warns once if that is by more than is
    /// tolerated. Programs are never stopped for that.
    pub(crate) fn note_over_limit(&self) {
        self.note_peaks();
        let sizes = self.sizes();
        self.warn_over_limit(self.excess(sizes), || {
            "what is left cannot be paged out (locked, executable or incompressible memory)"
                .to_owned()
        });
    }

    /// Notes that a program's memory was brought back for its tracer; warns once.
    pub(crate) fn note_held(&self, pid: i32, pages: u64) {
        self.note_peaks();
        if !self.warned_held.swap(true, Ordering::Relaxed) {
            log::warn!(
                "process {pid} is stopped by a debugger, which can read resident pages only: brought back \
                 {} KiB, and the limit is exceeded by as much until the process continues (reported once)",
                bytes(pages) / 1024
            );
        }
    }

    /// Current usage of each program whose helper connected.
    pub(crate) fn programs(&self) -> Vec<ProgramUsage> {
        let usage = |space: Arc<AddressSpace>| {
            let pid = space.attached()?.inspector.pid();
            space.note_staged();
            let usage = space.charges().usage();
            Some(ProgramUsage {
                pid,
                resident_bytes: usage.resident,
                staged_bytes: usage.staged,
                pool_bytes: usage.pool,
                file_bytes: usage.file,
                remote_bytes: usage.remote,
            })
        };
        self.spaces().into_iter().filter_map(usage).collect()
    }

    /// All statistics now.
    pub(crate) fn stats(&self) -> Stats {
        for space in self.spaces() {
            space.note_staged();
        }
        self.note_peaks();
        let resources = &self.resources;
        let usage = resources.swap.usage();
        let worst = self.limit.worst();
        let charged = resources.swap.root_group().usage();
        let file = self.file.as_ref().map(|file| file.usage());
        let remote = self.remote.as_ref().map(|remote| remote.tier.usage());
        let remote = remote.unwrap_or_default();
        Stats {
            now: Now {
                resident_bytes: resources.resident_bytes(),
                pool_bytes: usage.pool_bytes,
                metadata_bytes: self.metadata_bytes(),
                staged_bytes: charged.staged,
                file_bytes: charged.file,
                remote_bytes: charged.remote,
                mapped_bytes: self.mapped_bytes(),
                processes_now: self.read_spaces(|spaces| spaces.len() as u64),
            },
            totals: Totals {
                limit_bytes: self.limit().total_bytes.unwrap_or(0),
                resident_limit_bytes: self.resident_limit_in_force(),
                pages_same_filled: usage.same_filled_total,
                bytes_stored: usage.bytes_stored_total,
                bytes_original: usage.bytes_original_total,
                pages_recompressed: usage.recompressed_total,
                pages_in_blocks: usage.block_total,
                pages_written_back: usage.written_back_total,
                file_errors: file.map_or(0, |file| file.write_errors + file.read_errors),
                remote_pages_out: remote.pages_out,
                remote_pages_in: remote.pages_in,
                remote_retries: remote.retries,
                remote_failures: remote.store_failures + remote.load_failures,
                remote_lost_pages: remote.lost_pages,
                remote_copies_read: remote.copies_read,
                ..resources.counters.totals()
            },
            exceeded_limit_bytes: worst.limit,
            exceeded_by_bytes: worst.bytes,
            fault_ns: resources.latency.summary(),
            remote_fault_ns: resources.remote_latency.summary(),
        }
    }
}
