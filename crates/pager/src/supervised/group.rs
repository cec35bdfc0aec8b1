//! A group: the address spaces under one limit, the swap space they share, and the counters.

use crate::backoff::{Concession, Gains};
use crate::options::Limit;
use crate::page::VirtualPage;
use crate::page::bytes;
use crate::pool_memory::MappedSource;
use crate::supervised::fault::deferred::Deferred;
use crate::supervised::fork::shared_estimate::SharedPages;
use crate::supervised::latency::Histogram;
use crate::supervised::reclaim::priority::ReclaimerStanding;
use crate::supervised::space::AddressSpace;
use crate::supervised::stats::{ProgramUsage, Stats};
use crate::sync::{Event, lock};
use memfold_swap::{Charge, FileTier, Gather, GatherConfig, Slot, SlotRanges, SwapSpace};
use memfold_sys::PAGE_SIZE;
use memfold_sys::guardian::Guardian;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// The smallest resident limit that a full pool can press a group down to.
const RESIDENT_FLOOR_BYTES: u64 = 4 << 20;

/// What cannot be managed leaves to the rest at least one part in so many of the resident limit. More
/// keeps the limit better, and has the rest go out and come back more often.
const REFUSED_LEAVES: u64 = 2;

/// Slots that wait to be released, at most.
const SPARE_SLOTS: usize = 1024;

/// Counters, all monotonic but the `peak` ones, which are maxima.
#[derive(Default)]
pub struct Counters {
    pub faults_swap_in: AtomicU64,
    pub faults_zero_fill: AtomicU64,
    pub faults_cache: AtomicU64,
    pub pages_out: AtomicU64,
    pub pages_in: AtomicU64,
    pub processes: AtomicU64,
    pub peak_resident: AtomicU64,
    pub peak_pool: AtomicU64,
    pub peak_total: AtomicU64,
    pub peak_file: AtomicU64,
    pub peak_tables: AtomicU64,
    pub peak_table_slots: AtomicU64,
    pub peak_over_limit_pages: AtomicU64,
    pub longest_pause_ns: AtomicU64,
    pub errors: AtomicU64,
    pub connections_refused: AtomicU64,
    pub latency: Histogram,
}

/// See the module.
pub struct Group {
    pub limit: Limit,
    pub swap: Arc<SwapSpace<MappedSource>>,
    /// Releases slots that are given up many at a time.
    pub gather: Gather<MappedSource>,
    /// The tier for what does not fit, if there is one.
    pub file: Option<Arc<FileTier>>,
    pub counters: Counters,
    /// When the supervisor started: the zero of coarse times.
    pub started: Instant,
    /// Milliseconds since then: when mappings were last found that were not managed yet.
    pub found_mappings: AtomicU64,
    spaces: RwLock<HashMap<u64, Arc<AddressSpace>>>,
    next_id: AtomicU64,
    /// Held while a forked child's process is looked for.
    pub meeting: Mutex<()>,
    resident_limit: AtomicU64,
    concession: Concession,
    pub gains: Gains,
    /// Pages in memory that cannot be managed, as they have a userfaultfd of their program's own.
    pub refused_pages: AtomicU64,
    /// Pages that were brought back for tracers, by which the limit is exceeded while these hold their
    /// programs.
    pub held_pages: AtomicU64,
    /// Pages counted in more than one process because a fork shares them.
    pub shared: Arc<SharedPages>,
    pub deferred: Deferred,
    /// Slots of pages that were brought in, to be released by the reclaimer: the program's thread
    /// would wait for it, as the handler has its CPU.
    spare: Mutex<Vec<Slot>>,
    reclaimer: Event,
    pub standing: ReclaimerStanding,
    sharing: Event,
    /// Makes the background thread look.
    pub background: Event,
    pub stopping: AtomicBool,
    pub guardian: Guardian,
    warned_over_limit: AtomicBool,
    warned_zeroed: AtomicBool,
    warned_held: AtomicBool,
    pub warned_mappings: AtomicBool,
    pub warned_file: AtomicBool,
    /// Milliseconds since the start: until then the file is left alone.
    pub file_paused_until: AtomicU64,
    /// Held by who gives up the file; locked before all others.
    pub swapping_off: Mutex<()>,
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

impl Group {
    pub fn new(limit: Limit, swap: SwapSpace<MappedSource>, file: Option<Arc<FileTier>>) -> Group {
        let swap = Arc::new(swap);
        Group {
            limit,
            gather: new_gather(&swap),
            swap,
            gains: Gains::new(limit),
            file,
            counters: Counters::default(),
            started: Instant::now(),
            found_mappings: AtomicU64::new(0),
            spaces: RwLock::default(),
            next_id: AtomicU64::new(1),
            meeting: Mutex::default(),
            resident_limit: AtomicU64::new(u64::MAX),
            concession: Concession::new(Instant::now()),
            refused_pages: AtomicU64::new(0),
            held_pages: AtomicU64::new(0),
            shared: Arc::default(),
            deferred: Deferred::default(),
            spare: Mutex::default(),
            reclaimer: Event::default(),
            standing: ReclaimerStanding::default(),
            sharing: Event::default(),
            background: Event::default(),
            stopping: AtomicBool::new(false),
            guardian: Guardian::default(),
            warned_over_limit: AtomicBool::new(false),
            warned_zeroed: AtomicBool::new(false),
            warned_held: AtomicBool::new(false),
            warned_mappings: AtomicBool::new(false),
            warned_file: AtomicBool::new(false),
            file_paused_until: AtomicU64::new(0),
            swapping_off: Mutex::default(),
        }
    }

    /// Milliseconds since the start.
    pub fn milliseconds(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Seconds since the start, coarse.
    pub fn seconds(&self) -> u32 {
        self.started.elapsed().as_secs() as u32
    }

    pub fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub fn space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.get(&id).cloned())
    }

    pub fn spaces(&self) -> Vec<Arc<AddressSpace>> {
        self.read_spaces(|spaces| spaces.values().cloned().collect())
    }

    fn read_spaces<R>(&self, read: impl FnOnce(&HashMap<u64, Arc<AddressSpace>>) -> R) -> R {
        read(
            &self
                .spaces
                .read()
                .unwrap_or_else(|poison| poison.into_inner()),
        )
    }

    pub fn add_space(&self, space: Arc<AddressSpace>) {
        self.counters.processes.fetch_add(1, Ordering::Relaxed);
        let mut spaces = self
            .spaces
            .write()
            .unwrap_or_else(|poison| poison.into_inner());
        spaces.insert(space.id, space);
    }

    pub fn remove_space(&self, id: u64) -> Option<Arc<AddressSpace>> {
        self.spaces
            .write()
            .unwrap_or_else(|poison| poison.into_inner())
            .remove(&id)
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

    pub fn metadata_bytes(&self) -> u64 {
        let tables: u64 =
            self.read_spaces(|spaces| spaces.values().map(|space| space.metadata_bytes()).sum());
        self.swap.metadata_bytes() + tables
    }

    /// What the resident pages may come to, as of the last [`Group::refresh_limit`].
    pub fn resident_limit_bytes(&self) -> u64 {
        self.resident_limit.load(Ordering::Relaxed)
    }

    /// Works out what pool and metadata leave to the resident pages, and what was conceded.
    pub fn refresh_limit(&self) {
        let by_total = self.limit.total_bytes.map_or(u64::MAX, |total| {
            total
                .saturating_sub(self.swap.pool_bytes())
                .saturating_sub(self.metadata_bytes())
                .max(RESIDENT_FLOOR_BYTES)
        });
        let limit = by_total.min(self.limit.resident_bytes.unwrap_or(u64::MAX));
        // Where such memory takes most of the limit, all else would have to fit into what is left.
        let refused = bytes(self.refused_pages.load(Ordering::Relaxed));
        let limit = match refused {
            0 => limit,
            _ => limit.max(refused + limit / REFUSED_LEAVES),
        };
        let conceded = self.concession.bytes(Instant::now());
        let held = bytes(self.held_pages.load(Ordering::Relaxed));
        self.resident_limit
            .store(limit.max(conceded).saturating_add(held), Ordering::Relaxed);
    }

    /// Releases slots soon, or at once if many wait already: what they hold is counted still.
    pub fn release_soon(&self, slots: &[Slot]) {
        let mut spare = lock(&self.spare);
        if spare.len() + slots.len() <= SPARE_SLOTS {
            spare.extend_from_slice(slots);
        } else {
            drop(spare);
            self.swap.release_bulk(slots);
        }
    }

    /// Releases what [`Group::release_soon`] left.
    pub fn release_spare(&self) {
        let spare = std::mem::take(&mut *lock(&self.spare));
        if !spare.is_empty() {
            self.swap.release_bulk(&spare);
        }
    }

    /// Makes the reclaimer look now.
    pub fn call_reclaimer(&self) {
        self.reclaimer.notify();
    }

    /// The same where there is little room left.
    pub fn press_reclaimer(&self) {
        self.standing.press();
        self.call_reclaimer();
    }

    /// Waits for a call, at most `timeout`.
    pub fn wait_for_call(&self, timeout: Duration) {
        self.reclaimer.wait(timeout);
    }

    /// Asks for a count of what forks share.
    pub fn count_sharing(&self) {
        self.sharing.notify();
    }

    /// Waits until that is asked for, at most `timeout`; whether it was.
    pub fn wait_for_sharing(&self, timeout: Duration) -> bool {
        self.sharing.wait(timeout)
    }

    /// Notes peaks; called by whoever sampled.
    pub fn note_peaks(&self) {
        let resident = self.resident_bytes();
        let pool = self.swap.pool_bytes();
        let file = self.swap.root_group().charged(Charge::File);
        let total = resident + pool + self.metadata_bytes();
        let counters = &self.counters;
        counters
            .peak_resident
            .fetch_max(resident, Ordering::Relaxed);
        counters.peak_pool.fetch_max(pool, Ordering::Relaxed);
        counters.peak_file.fetch_max(file, Ordering::Relaxed);
        let tables = self.swap.table_bytes();
        if tables > counters.peak_tables.fetch_max(tables, Ordering::Relaxed) {
            let slots = self.swap.usage().slots_in_use;
            counters.peak_table_slots.store(slots, Ordering::Relaxed);
        }
        counters.peak_total.fetch_max(total, Ordering::Relaxed);
        counters
            .peak_over_limit_pages
            .fetch_max(self.excess(resident, total), Ordering::Relaxed);
    }

    /// Pages above what the user allowed.
    fn excess(&self, resident: u64, total: u64) -> u64 {
        let above =
            |held: u64, limit: Option<u64>| limit.map_or(0, |limit| held.saturating_sub(limit));
        let excess =
            above(total, self.limit.total_bytes).max(above(resident, self.limit.resident_bytes));
        excess / PAGE_SIZE as u64
    }

    /// Concedes what is resident, as nothing more can be moved out.
    pub fn concede(&self) {
        self.concession.grant(self.resident_bytes(), Instant::now());
        self.refresh_limit();
    }

    /// Notes that reclaim could not get the group under its limit, which is exceeded then rather
    /// than a program stopped; warns once.
    pub fn note_over_limit(&self) {
        self.note_peaks();
        let resident = self.resident_bytes();
        let total = resident + self.swap.usage().pool_bytes + self.metadata_bytes();
        let excess = self.excess(resident, total);
        if excess > 0 && !self.warned_over_limit.swap(true, Ordering::Relaxed) {
            log::warn!(
                "the limit is exceeded by {} KiB, as nothing more can be moved out; raise --limit \
                 (this is said once)",
                excess * PAGE_SIZE as u64 / 1024
            );
        }
    }

    /// Notes that a program's memory was brought back for its tracer; says so once.
    pub fn note_held(&self, pid: i32, pages: u64) {
        self.note_peaks();
        if !self.warned_held.swap(true, Ordering::Relaxed) {
            log::warn!(
                "process {pid} is stopped by a debugger, which can only read what is in memory: {} KiB are \
                 brought back, and the limit is exceeded by as much until it goes on (this is said once)",
                bytes(pages) / 1024
            );
        }
    }

    /// Notes that a page was not where it was known to be, and its program was given zeros; says so
    /// once. The program may have given it up: memory that it freed lazily the kernel takes when the
    /// host is short of it, and what lay under a guard region is gone; neither is told.
    pub fn note_zeroed(&self, space: &AddressSpace, page: VirtualPage) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        if !self.warned_zeroed.swap(true, Ordering::Relaxed) {
            let pid = space.inspector().map_or(0, |inspector| inspector.pid());
            let kind = if space.beacon().is_some() {
                "forked"
            } else {
                "executed"
            };
            log::error!(
                "a page ({:#x} of the {kind} process {pid}) was not in memory, where it was known to be, \
                 and reads zeros now: if the program did not give it up (MADV_FREE, MADV_GUARD_INSTALL), \
                 its contents are lost; please report that (this is said once)",
                page.address()
            );
        }
    }

    /// What each program uses.
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

    pub fn stats(&self) -> Stats {
        for space in self.spaces() {
            space.note_staged();
        }
        let usage = self.swap.usage();
        let charged = self.swap.root_group().usage();
        let file = self.file.as_ref().map(|file| file.usage());
        let counters = &self.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.note_peaks();
        Stats {
            limit_bytes: self.limit.total_bytes.unwrap_or(0),
            resident_limit_bytes: self.resident_limit_bytes(),
            resident_bytes: self.resident_bytes(),
            pool_bytes: usage.pool_bytes,
            metadata_bytes: self.metadata_bytes(),
            staged_bytes: charged.staged,
            file_bytes: charged.file,
            peak_resident_bytes: load(&counters.peak_resident),
            peak_pool_bytes: load(&counters.peak_pool),
            peak_total_bytes: load(&counters.peak_total),
            peak_file_bytes: load(&counters.peak_file),
            peak_table_bytes: load(&counters.peak_tables),
            peak_table_slots: load(&counters.peak_table_slots),
            faults_swap_in: load(&counters.faults_swap_in),
            faults_zero_fill: load(&counters.faults_zero_fill),
            faults_cache: load(&counters.faults_cache),
            pages_out: load(&counters.pages_out),
            pages_in: load(&counters.pages_in),
            pages_same_filled: usage.same_filled_total,
            bytes_stored: usage.bytes_stored_total,
            bytes_original: usage.bytes_original_total,
            pages_recompressed: usage.recompressed_total,
            pages_written_back: usage.written_back_total,
            file_errors: file.map_or(0, |file| file.write_errors + file.read_errors),
            processes: load(&counters.processes),
            processes_now: self.read_spaces(|spaces| spaces.len() as u64),
            over_limit_pages: load(&counters.peak_over_limit_pages),
            connections_refused: load(&counters.connections_refused),
            longest_pause_ns: load(&counters.longest_pause_ns),
            fault_ns: counters.latency.summary(),
        }
    }
}

/// Resident bytes at which things happen.
#[derive(Debug, Clone, Copy)]
pub struct Watermarks {
    /// Faults wait above this.
    pub hard: u64,
    /// The reclaimer makes way for nobody above this.
    pub pressing: u64,
    /// Background reclaim starts above this.
    pub start: u64,
    /// It stops below this.
    pub stop: u64,
}

impl Watermarks {
    /// For a resident limit.
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
