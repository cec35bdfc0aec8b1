//! A group: the address spaces under one limit, the swap space they share, and the counters.

use crate::backoff::{CompressionPolicy, LimitRelief};
use crate::options::Limit;
use crate::page::bytes;
use crate::pool_memory::MappedSource;
use crate::supervised::fault::deferred::Deferred;
use crate::supervised::resources::Resources;
use crate::supervised::space::AddressSpace;
use crate::supervised::stats::{Now, ProgramUsage, Stats, Totals};
use crate::sync::{Event, Mutex, RwLock};
use crate::time::Instant;
use memfold_swap::{Charge, FileTier, SwapSpace};
use memfold_sys::PAGE_SIZE;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The smallest resident limit that a full pool can press a group down to.
const RESIDENT_FLOOR_BYTES: u64 = 4 << 20;

/// Divisor of the resident limit: this part of it stays available to managed memory, whatever memory
/// cannot be managed. A larger divisor exceeds the limit by less and makes managed memory thrash more.
const MANAGED_DIVISOR: u64 = 2;

/// The same for evictable memory, beside read-only and locked mappings.
const EVICTABLE_DIVISOR: u64 = 4;

/// The programs under one limit. All threads of the supervisor share it.
///
/// `spaces` has its own lock. Atomics are flags, counters and times that only steer the threads, so
/// their accesses are Relaxed.
pub struct Group {
    /// What the address spaces use, too.
    pub resources: Arc<Resources>,
    /// The limit as configured.
    pub limit: Limit,
    /// The swap file, if there is one.
    pub file: Option<Arc<FileTier>>,
    /// Time of the last scan that found unmanaged mappings, in milliseconds since the supervisor's
    /// start.
    pub found_mappings: AtomicU64,
    spaces: RwLock<BTreeMap<u64, Arc<AddressSpace>>>,
    next_id: AtomicU64,
    /// Serializes searches for the process of a forked child.
    pub child_search: Mutex<()>,
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
    warned_over_limit: AtomicBool,
    warned_held: AtomicBool,
    /// A failed write to the swap file was logged.
    pub warned_file: AtomicBool,
    /// End of the pause after a failed write to the swap file, in milliseconds since the start.
    pub file_paused_until: AtomicU64,
    /// Serializes [`Group::swap_off`].
    pub swapping_off: Mutex<()>,
}

impl Group {
    /// A group without programs.
    pub fn new(limit: Limit, swap: SwapSpace<MappedSource>, file: Option<Arc<FileTier>>) -> Group {
        Group {
            resources: Arc::new(Resources::new(swap)),
            limit,
            compression: CompressionPolicy::new(limit),
            file,
            found_mappings: AtomicU64::new(0),
            spaces: RwLock::default(),
            next_id: AtomicU64::new(1),
            child_search: Mutex::default(),
            relief: LimitRelief::new(Instant::now()),
            refused_pages: AtomicU64::new(0),
            held_pages: AtomicU64::new(0),
            deferred: Deferred::default(),
            sharing: Event::default(),
            background: Event::default(),
            stopping: AtomicBool::new(false),
            warned_over_limit: AtomicBool::new(false),
            warned_held: AtomicBool::new(false),
            warned_file: AtomicBool::new(false),
            file_paused_until: AtomicU64::new(0),
            swapping_off: Mutex::default(),
        }
    }

    /// An ID for a new address space.
    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The address space with this ID.
    pub fn space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.get(&id).cloned())
    }

    /// All address spaces at this moment.
    pub fn spaces(&self) -> Vec<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.values().cloned().collect())
    }

    /// Number of address spaces.
    pub fn space_count(&self) -> usize {
        self.read_spaces(BTreeMap::len)
    }

    fn read_spaces<R>(&self, read: impl FnOnce(&BTreeMap<u64, Arc<AddressSpace>>) -> R) -> R {
        read(
            &self
                .spaces
                .read()
                .unwrap_or_else(|poison| poison.into_inner()),
        )
    }

    /// Adds an address space and counts a program.
    pub fn add_space(&self, space: Arc<AddressSpace>) {
        self.resources
            .counters
            .processes
            .fetch_add(1, Ordering::Relaxed);
        let mut spaces = self
            .spaces
            .write()
            .unwrap_or_else(|poison| poison.into_inner());
        spaces.insert(space.id, space);
    }

    /// Removes an address space, which lives on until its last reference is dropped.
    pub fn remove_space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.spaces
            .write()
            .unwrap_or_else(|poison| poison.into_inner())
            .remove(&id)
    }

    /// Bytes of the swap tables and of all page tables.
    pub fn metadata_bytes(&self) -> u64 {
        let tables: u64 =
            self.read_spaces(|spaces| spaces.values().map(|space| space.metadata_bytes()).sum());
        self.resources.swap.metadata_bytes() + tables
    }

    /// Recomputes the resident limit from the limit, the pool, metadata and allowances above the limit.
    pub fn refresh_limit(&self) {
        let by_total = self.limit.total_bytes.map_or(u64::MAX, |total| {
            total
                .saturating_sub(self.resources.swap.pool_bytes())
                .saturating_sub(self.metadata_bytes())
                .max(RESIDENT_FLOOR_BYTES)
        });
        let limit = by_total.min(self.limit.resident_bytes.unwrap_or(u64::MAX));
        // Without these floors, memory that cannot be managed would leave managed memory almost no room, and
        // unevictable pages the evictable ones.
        let floor = |pages: u64, divisor: u64| match pages {
            0 => limit,
            pages => limit.max(bytes(pages) + limit / divisor),
        };
        let limit = floor(self.refused_pages.load(Ordering::Relaxed), MANAGED_DIVISOR)
            .max(floor(self.unevictable_pages(), EVICTABLE_DIVISOR));
        let relief = self.relief.bytes(Instant::now());
        let held = bytes(self.held_pages.load(Ordering::Relaxed));
        self.resources
            .set_resident_limit(limit.max(relief).saturating_add(held));
    }

    /// Resident pages that are not evictable, in programs with unevictable mappings. Pages that forks
    /// share may all be among them, and count once.
    fn unevictable_pages(&self) -> u64 {
        let found = |space: &Arc<AddressSpace>| {
            let pages = space.unevictable.pages();
            if space.has_left() { 0 } else { pages }
        };
        let found: u64 = self.read_spaces(|spaces| spaces.values().map(found).sum());
        found.saturating_sub(self.resources.shared.pages())
    }

    /// Requests a count of the pages that forks share.
    pub fn count_sharing(&self) {
        self.sharing.notify();
    }

    /// Waits for [`Group::count_sharing`], at most `timeout`. Returns whether a count was requested.
    pub fn wait_for_sharing(&self, timeout: Duration) -> bool {
        self.sharing.wait(timeout)
    }

    /// Updates the peak statistics from the current sizes.
    pub fn note_peaks(&self) {
        let resident = self.resources.resident_bytes();
        let pool = self.resources.swap.pool_bytes();
        let file = self.resources.swap.root_group().charged(Charge::File);
        let total = resident + pool + self.metadata_bytes();
        let counters = &self.resources.counters;
        counters
            .peak_resident_bytes
            .fetch_max(resident, Ordering::Relaxed);
        counters.peak_pool_bytes.fetch_max(pool, Ordering::Relaxed);
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
            .fetch_max(total, Ordering::Relaxed);
        counters
            .over_limit_pages
            .fetch_max(self.excess(resident, total), Ordering::Relaxed);
    }

    /// Pages above the configured limit.
    fn excess(&self, resident: u64, total: u64) -> u64 {
        let above =
            |held: u64, limit: Option<u64>| limit.map_or(0, |limit| held.saturating_sub(limit));
        let excess =
            above(total, self.limit.total_bytes).max(above(resident, self.limit.resident_bytes));
        excess / PAGE_SIZE as u64
    }

    /// Raises the limit to the resident size for a while, because nothing more can be reclaimed.
    pub fn relax_limit(&self) {
        self.relief
            .relax(self.resources.resident_bytes(), Instant::now());
        self.refresh_limit();
    }

    /// Notes that reclaim cannot bring the group under its limit; warns once. Programs are never
    /// stopped for that.
    pub fn note_over_limit(&self) {
        self.note_peaks();
        let resident = self.resources.resident_bytes();
        let total = resident + self.resources.swap.usage().pool_bytes + self.metadata_bytes();
        let excess = self.excess(resident, total);
        if excess > 0 && !self.warned_over_limit.swap(true, Ordering::Relaxed) {
            log::warn!(
                "the limit is exceeded by {} KiB, because no more memory can be paged out (for \
                 example, it is locked, executable or incompressible); raise --limit (reported once)",
                excess * PAGE_SIZE as u64 / 1024
            );
        }
    }

    /// Notes that a program's memory was brought back for its tracer; warns once.
    pub fn note_held(&self, pid: i32, pages: u64) {
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
    pub fn programs(&self) -> Vec<ProgramUsage> {
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
            })
        };
        self.spaces().into_iter().filter_map(usage).collect()
    }

    /// All statistics now.
    pub fn stats(&self) -> Stats {
        for space in self.spaces() {
            space.note_staged();
        }
        self.note_peaks();
        let resources = &self.resources;
        let usage = resources.swap.usage();
        let charged = resources.swap.root_group().usage();
        let file = self.file.as_ref().map(|file| file.usage());
        Stats {
            now: Now {
                resident_bytes: resources.resident_bytes(),
                pool_bytes: usage.pool_bytes,
                metadata_bytes: self.metadata_bytes(),
                staged_bytes: charged.staged,
                file_bytes: charged.file,
                processes_now: self.read_spaces(|spaces| spaces.len() as u64),
            },
            totals: Totals {
                limit_bytes: self.limit.total_bytes.unwrap_or(0),
                resident_limit_bytes: resources.resident_limit_bytes(),
                pages_same_filled: usage.same_filled_total,
                bytes_stored: usage.bytes_stored_total,
                bytes_original: usage.bytes_original_total,
                pages_recompressed: usage.recompressed_total,
                pages_written_back: usage.written_back_total,
                file_errors: file.map_or(0, |file| file.write_errors + file.read_errors),
                ..resources.counters.totals()
            },
            fault_ns: resources.latency.summary(),
        }
    }
}

/// Watermarks in resident bytes (not in free pages, as in the kernel): `hard > pressing > start >
/// stop`.
#[derive(Debug, Clone, Copy)]
pub struct Watermarks {
    /// The limit; faults that need room wait above it.
    pub hard: u64,
    /// Above this the reclaimer no longer yields its CPU to programs.
    pub pressing: u64,
    /// Background reclaim starts above this.
    pub start: u64,
    /// Background reclaim stops below this.
    pub stop: u64,
}

impl Watermarks {
    /// The watermarks for a resident limit in bytes. A larger distance reclaims in longer bursts and
    /// keeps less resident.
    pub fn of(limit: u64) -> Watermarks {
        let distance = (limit / 128).clamp(512 << 10, 32 << 20).min(limit / 4);
        Watermarks {
            hard: limit,
            pressing: limit - distance / 4,
            start: limit - distance,
            stop: limit - 2 * distance,
        }
    }
}
