//! The pool's share of the limit, the swap file, and the background thread that migrates cold pages.
//!
//! The pool counts towards `--limit`. With a swap file it may take half of the limit; beyond that, the
//! pages stored longest ago are written back to the file. The background thread does that ahead of the
//! reclaimer, which writes back itself if the thread does not keep up ([`Group::shrink_pool`]). Without
//! a file, or when it is full or fails, a growing pool leaves less room for resident pages, and incompressible
//! pages stay resident.
//!
//! Independently, pages that stay cold are recompressed, neighbours together as blocks, and later written to
//! the file. Without a time for that, they are recompressed under pressure, while CPUs are idle ([`Packing`]).

use crate::cpu_waiting::CpuWaiting;
use crate::supervised::group::{Group, Remote};
use crate::sync::lock;
use crate::time::Instant;
use memfold_swap::{
    FileTier, MAX_AGE, MigrateReport, NewSwapSpaceError, ScanPolicy, Scratch, StoreError, TierKey,
    TierKind,
};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::options::{Options, SwapFileOptions};
use crate::supervised::swap::packing::{Counts, Packing};
use crate::supervised::swap::swap_file::SwapFile;

/// Bytes of the pool written to the file per step. More makes fewer steps and blocks other threads for
/// longer.
const WRITE_BACK_BYTES: u64 = 256 << 10;
/// Slots visited per step of a scan. More makes fewer steps and blocks other threads for longer.
const SCAN_SLOTS: usize = 512;
/// Zstandard level in the file. Higher compresses better and takes more CPU time.
const FILE_LEVEL: i32 = 1;
/// Bounds of the background thread's interval.
const SHORTEST_TICK: Duration = Duration::from_millis(20);
const LONGEST_TICK: Duration = Duration::from_millis(500);
/// The interval where pages are recompressed under pressure. Longer leaves the pool large for longer.
const PACKING_TICK: Duration = Duration::from_millis(100);
/// Minimum time between two compactions of the pool. More takes less CPU time and leaves more waste.
const COMPACT_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of waste below which the pool is not compacted. More takes less CPU time and leaves more
/// waste.
const WASTE_FLOOR: u64 = 1 << 20;
/// The pool is compacted if more than 1/`WASTE_DIVISOR` of it is waste. More takes less memory, and copies
/// more.
const WASTE_DIVISOR: u64 = 16;
/// Pause of write-back after the file took no page. Longer saves futile writes and leaves the pool over
/// its share for longer.
const FILE_PAUSE: Duration = Duration::from_millis(200);
/// Slots of the gather's backlog released per step by a thread that needs memory. More makes fewer
/// steps and checks the pool's size less often.
const HELP_SLOTS: u64 = 4096;

/// A swap file could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapFileError {
    /// The file could not be created, or no encryption key could be generated.
    #[error("cannot create a swap file in {path}: {source}")]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file would exceed the maximum file size.
    #[error(
        "cannot create a swap file of {bytes} bytes in {path}: it exceeds the maximum file size; raise \
         `ulimit -f`, use another file system, or give a smaller --swap-size"
    )]
    TooLong {
        /// The directory.
        path: PathBuf,
        /// The requested size.
        bytes: u64,
    },
    /// The tier could not be set up.
    #[error(transparent)]
    Tier(#[from] NewSwapSpaceError),
}

/// Creates the swap file of a run, encrypted with a random key that exists in this process only.
pub fn open_swap_file(options: &SwapFileOptions) -> Result<FileTier, SwapFileError> {
    let failed = |source| SwapFileError::Create {
        path: options.directory.clone(),
        source,
    };
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|error| failed(error.into()))?;
    let file = SwapFile::create(&options.directory, options.bytes);
    let file = file.map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => SwapFileError::TooLong {
            path: options.directory.clone(),
            bytes: options.bytes,
        },
        _ => failed(error),
    })?;
    Ok(FileTier::new(
        Box::new(file),
        options.bytes,
        &TierKey::new(key),
        FILE_LEVEL,
    )?)
}

/// Watermarks of the pool in bytes, above which pages are written back to the swap file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolShare {
    /// The background thread writes back above this.
    start: u64,
    /// The background thread stops below this.
    stop: u64,
    /// The reclaimer writes back itself above this.
    hard: u64,
}

impl PoolShare {
    /// The watermarks for half of the limit.
    pub(crate) fn of(limit: u64) -> PoolShare {
        let share = limit / 2;
        let distance = (share / 32).min(32 << 20);
        PoolShare {
            start: share - distance,
            stop: share - 2 * distance,
            hard: share,
        }
    }
}

impl Group {
    /// The pool's watermarks, if the swap file has room or a store takes pages. A file that refused pages is
    /// tried again and again.
    fn pool_share(&self) -> Option<PoolShare> {
        let has_room = |file: &Arc<FileTier>| {
            let usage = file.usage();
            !file.is_closed() && usage.used_bytes < usage.size_bytes
        };
        let may_take = self.file.as_ref().is_some_and(has_room) || self.store_takes_pages();
        let total = self.limit().total_bytes.filter(|_| may_take);
        total.map(PoolShare::of)
    }

    fn store_takes_pages(&self) -> bool {
        let takes = |remote: &Remote| !remote.tier.is_closed() && !remote.tier.is_paused();
        self.remote.as_ref().is_some_and(takes)
    }

    /// Whether what goes to the pool can leave it: a file that is almost full, or fails, takes nothing.
    fn has_outlet(&self) -> bool {
        let takes =
            |file: &Arc<FileTier>| !file.is_closed() && !file.is_full() && !file.is_failing();
        self.file.as_ref().is_some_and(takes) || self.store_takes_pages()
    }

    /// Keeps the pool within its share, at the latest until then. Called by the reclaimer before it stores pages.
    pub(crate) fn hold_pool_limit(&self, scratch: &mut Scratch, until: Option<Instant>) {
        let share = self.pool_share();
        self.compression
            .note_outlet(share.is_some() && self.has_outlet());
        let Some(share) = share else {
            return;
        };
        let _yielding = self.resources.priority.yield_to_programs();
        if self.resources.swap.pool_bytes() > share.start {
            self.background.notify();
        }
        // A slow device takes seconds for what a lowered limit leaves to write. Faults that have waited for long are
        // served in between.
        let go_on = || {
            !self.deferred.is_overdue()
                && until.is_none_or(|until| Instant::now() < until)
                && !self.stopping.load(Ordering::Relaxed)
        };
        self.shrink_pool(share.hard, scratch, go_on);
    }

    /// Shrinks the pool to `target` bytes, as far as the swap file or the store takes pages, and as long as it is to go on.
    fn shrink_pool(&self, target: u64, scratch: &mut Scratch, go_on: impl Fn() -> bool) {
        while go_on() {
            // Read once: pages are freed meanwhile.
            let excess = self.resources.swap.pool_bytes().saturating_sub(target);
            if excess == 0 {
                break;
            }
            if self.resources.gather.help(HELP_SLOTS) > 0 {
                continue;
            }
            let now = self.resources.milliseconds();
            if now < self.file_paused_until.load(Ordering::Relaxed) {
                break;
            }
            let report = self
                .resources
                .swap
                .write_back(excess.min(WRITE_BACK_BYTES), scratch);
            self.note_trouble(&report);
            // Free the memory, so that the pool's size reflects the write-back.
            self.resources.swap.trim_spare();
            if report.moved == 0 {
                let until = now + FILE_PAUSE.as_millis() as u64;
                self.file_paused_until.store(until, Ordering::Relaxed);
                break;
            }
        }
    }

    /// Tries whether a file works again to which the last write failed, though nothing has to leave the
    /// pool: until it does, incompressible pages stay resident, and the pool may never need the file.
    fn probe_file(&self) {
        let failing = self.file.as_ref().filter(|file| file.is_failing());
        // A store that takes pages is an outlet by itself, and is not to pause with the file.
        let Some(file) = failing.filter(|_| !self.store_takes_pages()) else {
            return;
        };
        let now = self.resources.milliseconds();
        if now >= self.file_paused_until.load(Ordering::Relaxed) && file.probe().is_err() {
            let until = now + FILE_PAUSE.as_millis() as u64;
            self.file_paused_until.store(until, Ordering::Relaxed);
        }
    }

    /// Warns once if a write to the file failed.
    fn note_trouble(&self, report: &MigrateReport) {
        let Some(StoreError::Tier {
            tier: TierKind::File,
            reason,
        }) = report.store_error
        else {
            return;
        };
        let closed = self.file.as_ref().is_some_and(|file| file.is_closed());
        if !closed && !self.warned_file.swap(true, Ordering::Relaxed) {
            log::warn!(
                "the swap file takes no more pages for now ({reason}); they stay in memory; free space \
                 on its file system, or give a larger --swap-size (reported once)"
            );
        }
    }

    /// Moves all pages from the store on other machines and from the swap file to the pool, and stops
    /// using them. Returns their number. If they do not fit under the limit, the error has the number
    /// of pages left, and what they are in stays in use.
    pub(crate) fn swap_off(&self) -> Result<u64, SwapOffError> {
        if self.file.is_none() && self.remote.is_none() {
            return Err(SwapOffError::NoFile);
        }
        // A failed swapoff reopens the file, which would undo a concurrent one.
        let _guard = lock(&self.swapping_off);
        let mut moved = 0;
        let mut emptied = None;
        if let Some(Remote { tier, .. }) = &self.remote {
            let was_open = !tier.is_closed();
            moved += self.empty(TierKind::Remote, |closed| tier.set_closed(closed))?;
            emptied = was_open.then_some(tier);
        }
        if let Some(file) = &self.file {
            let from_file = self.empty(TierKind::File, |closed| file.set_closed(closed));
            if let (Err(_), Some(tier)) = (&from_file, emptied) {
                tier.set_closed(false);
            }
            moved += from_file?;
        }
        Ok(moved)
    }

    /// Moves all pages from a tier to the pool. Returns their number.
    fn empty(&self, kind: TierKind, close: impl Fn(bool)) -> Result<u64, SwapOffError> {
        let before = self.resources.swap.pages_in(kind);
        close(true);
        let mut scratch = Scratch::new();
        let mut more = u64::MAX;
        loop {
            let report = self
                .resources
                .swap
                .evacuate(kind, &mut scratch, || self.has_room());
            let left = self.resources.swap.pages_in(kind);
            if left == 0 {
                return Ok(before);
            }
            // Writes in flight when the file was closed may leave pages behind: try again while that
            // helps.
            if !report.finished || left >= more {
                close(false);
                return Err(match report.failed {
                    0 => SwapOffError::NoRoom { pages: left },
                    _ => SwapOffError::Unreadable { pages: left },
                });
            }
            more = left;
        }
    }

    /// Whether the pool can grow and leave at least 1/8 of the limit to resident pages.
    fn has_room(&self) -> bool {
        let taken = self.resources.swap.pool_bytes() + self.metadata_bytes();
        self.limit()
            .total_bytes
            .is_none_or(|limit| taken < limit - limit / 8)
    }
}

impl Group {
    /// What decides about blocks.
    fn packing_counts(&self) -> Counts {
        let usage = self.resources.swap.usage();
        Counts {
            out: usage.pages_stored_total,
            stored: usage.stored_pages,
            packed: usage.block_total,
            in_blocks: usage.block_pages,
            pool_bytes: usage.pool_bytes,
        }
    }
}

/// Why a swap file is still in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwapOffError {
    /// The run has neither a swap file nor a store.
    #[error("this run has neither a swap file nor a remote store")]
    NoFile,
    /// The pages do not fit into the limit.
    #[error(
        "{pages} pages of the swap file or the store do not fit into 7/8 of the limit, so it stays in use; raise \
         the limit (memfold limit) and try again"
    )]
    NoRoom {
        /// Pages that are still out.
        pages: u64,
    },
    /// Some pages cannot be read or stored now.
    #[error(
        "{pages} pages of the swap file or the store cannot be read back now, so it stays in use; file_errors and \
         remote_failures of memfold stat --json tell more"
    )]
    Unreadable {
        /// Pages that are still out.
        pages: u64,
    },
}

/// The background thread: writes back, scans for cold pages, compacts the pool.
pub(crate) struct Background {
    group: Arc<Group>,
    scratch: Scratch,
    plan: ScanPlan,
    /// `None` if pages are recompressed by time only.
    packing: Option<Packing>,
    /// Slots that are due to be scanned.
    owed: f64,
    /// Time of the last scan.
    scanned: Instant,
    /// Time of the last compaction.
    compacted: Instant,
}

impl Background {
    /// The background thread of a group.
    pub(crate) fn new(group: Arc<Group>, options: &Options) -> Background {
        let write_back = options
            .writeback_after
            .filter(|_| options.swap_file.is_some() || options.remote.is_some());
        let under_pressure =
            options.recompress.is_some_and(|one| one.under_pressure) && write_back.is_none();
        Background {
            group,
            scratch: Scratch::new(),
            plan: ScanPlan::new(options.recompress.map(|one| one.after), write_back),
            // Ages count page-outs then, and write-back by time needs them to count time.
            packing: under_pressure.then(Packing::new),
            owed: 0.0,
            scanned: Instant::now(),
            compacted: Instant::now(),
        }
    }

    /// Runs until the group stops.
    pub(crate) fn run(&mut self) {
        // Programs and their faults have priority.
        memfold_sys::thread::set_nice(10);
        while !self.group.stopping.load(Ordering::Relaxed) {
            self.group.background.wait(self.tick());
            if let Some(share) = self.group.pool_share() {
                if self.group.resources.swap.pool_bytes() > share.start {
                    let go_on = || !self.group.stopping.load(Ordering::Relaxed);
                    self.group.shrink_pool(share.stop, &mut self.scratch, go_on);
                } else {
                    self.group.probe_file();
                }
            }
            self.scan();
            self.pack();
            self.compact();
        }
    }

    fn tick(&self) -> Duration {
        let tick = self.plan.tick();
        match &self.packing {
            Some(_) if self.group.limit().total_bytes.is_some() => tick.min(PACKING_TICK),
            _ => tick,
        }
    }

    /// Moves cold pages into blocks if memory is short and CPUs are idle.
    fn pack(&mut self) {
        // Without a limit on the total, a smaller pool makes no room.
        let (Some(packing), Some(limit)) = (&mut self.packing, self.group.limit().total_bytes)
        else {
            return;
        };
        let group = &self.group;
        let swap = &group.resources.swap;
        let policy = ScanPolicy {
            recompress: Some(1),
            write_back: None,
        };
        while !group.stopping.load(Ordering::Relaxed)
            && packing.may_step(Instant::now())
            && packing.has_work(group.packing_counts(), limit, swap.scan_length())
        {
            let Some(before) = CpuWaiting::of_this_thread() else {
                log::debug!("the kernel keeps no scheduler statistics: no blocks under pressure");
                self.packing = None;
                return;
            };
            let report = swap.scan(policy, SCAN_SLOTS, &mut self.scratch);
            group.note_trouble(&report);
            let Some(now) = CpuWaiting::of_this_thread() else {
                return;
            };
            packing.note_step(SCAN_SLOTS, now.since(before), Instant::now());
        }
    }

    /// Scans the slots that are due.
    fn scan(&mut self) {
        let elapsed = self.scanned.elapsed();
        self.scanned = Instant::now();
        let Some(period) = self.plan.period else {
            return;
        };
        let swap = &self.group.resources.swap;
        // Wrapping around at the end takes one step.
        let length = (swap.scan_length() + SCAN_SLOTS) as f64;
        let part = elapsed.as_secs_f64() / period.as_secs_f64();
        self.owed = (self.owed + part * length).min(length);
        while self.owed >= SCAN_SLOTS as f64 && !self.group.stopping.load(Ordering::Relaxed) {
            self.owed -= SCAN_SLOTS as f64;
            let report = swap.scan(self.plan.policy, SCAN_SLOTS, &mut self.scratch);
            self.group.note_trouble(&report);
        }
    }

    /// Compacts the pool if too much of it is waste.
    fn compact(&mut self) {
        if self.compacted.elapsed() < COMPACT_INTERVAL {
            return;
        }
        self.compacted = Instant::now();
        let swap = &self.group.resources.swap;
        let wasted = || {
            let pool = swap.pool_bytes();
            // What dead pages take in blocks, compaction does not give back.
            let used = swap.root_group().usage().pool + swap.dead_bytes();
            let waste = pool.saturating_sub(used);
            waste > WASTE_FLOOR && waste > pool / WASTE_DIVISOR
        };
        if wasted() {
            swap.compact(|| !self.group.stopping.load(Ordering::Relaxed));
            if wasted() {
                swap.trim();
            }
        }
    }
}

/// The period of scans, and the ages at which pages migrate.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ScanPlan {
    /// Duration of one scan of all slots; `None` if no page migrates by age.
    period: Option<Duration>,
    policy: ScanPolicy,
}

impl ScanPlan {
    /// The plan for the minimum times without an access before recompression and write-back.
    fn new(recompress: Option<Duration>, write_back: Option<Duration>) -> ScanPlan {
        let both = || recompress.iter().chain(&write_back);
        let period = both().min().map(|shortest| {
            let longest = both().max().unwrap_or(shortest);
            // Ages saturate at `MAX_AGE`.
            (*shortest)
                .max(*longest / u32::from(MAX_AGE))
                .max(SHORTEST_TICK)
        });
        let age = |after: Duration| {
            let scans = after.as_secs_f64() / period.map_or(1.0, |period| period.as_secs_f64());
            (scans.ceil() as u8).clamp(1, MAX_AGE)
        };
        ScanPlan {
            period,
            policy: ScanPolicy {
                recompress: recompress.map(age),
                write_back: write_back.map(age),
            },
        }
    }

    fn tick(&self) -> Duration {
        self.period.map_or(LONGEST_TICK, |period| {
            (period / 32).clamp(SHORTEST_TICK, LONGEST_TICK)
        })
    }
}

#[cfg(test)]
mod tests;
