//! The tiers of a group's swap space: the pool's share of the limit, the swap file, and the thread
//! that moves what is cold.
//!
//! The pool is part of what `--limit` covers. Where there is a swap file, the pool may take half of
//! the limit; what is stored beyond that drives those pages to the file that were stored longest
//! ago. The thread here does that ahead of the reclaimer, who does it himself if the thread does not
//! keep up ([`Group::shrink_pool`]). Without a file, or when it is full, the pool takes what it
//! needs, and leaves less to the resident pages; what does not compress stays among those.
//!
//! Beside that, pages that stay cold for long are compressed again, then written to the file.

use crate::supervised::group::Group;
use crate::sync::lock;
use memfold_swap::{
    FileKey, FileTier, MAX_AGE, MigrateReport, NewSwapSpaceError, ScanPolicy, Scratch, StoreError,
    TierKind,
};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::options::{Options, SwapFileOptions};
use crate::supervised::swap::swap_file::SwapFile;

/// Bytes of the pool that are written to the file at a time: the time for which another may have to
/// wait.
const WRITE_BACK_BYTES: u64 = 256 << 10;
/// Slots looked at in one scan: the same.
const SCAN_SLOTS: usize = 512;
/// Zstandard's level in the file.
const FILE_LEVEL: i32 = 1;
const SHORTEST_TICK: Duration = Duration::from_millis(20);
const LONGEST_TICK: Duration = Duration::from_millis(500);
/// The pool is packed at most so often.
const COMPACT_INTERVAL: Duration = Duration::from_millis(250);
/// Waste that is not worth packing the pool for.
const WASTE_FLOOR: u64 = 4 << 20;
/// How long the file is left alone when it took nothing.
const FILE_PAUSE: Duration = Duration::from_millis(200);
/// Slots that one who needs memory releases at a time.
const HELP_SLOTS: u64 = 4096;

/// A swap file could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapFileError {
    /// The file could not be made, or has no key.
    #[error("cannot make a swap file in {path}: {source}")]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file may not be as long as it was to be.
    #[error(
        "a swap file of {bytes} bytes in {path} is longer than files may be there; raise the limit on \
         them (ulimit -f) or give a smaller --swap-size"
    )]
    TooLong {
        /// The directory.
        path: PathBuf,
        /// How long it was to be.
        bytes: u64,
    },
    /// The tier could not be set up.
    #[error(transparent)]
    Tier(#[from] NewSwapSpaceError),
}

/// Makes the swap file of a run, with a key that nobody else has.
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
        &FileKey::new(key),
        FILE_LEVEL,
    )?)
}

/// How much of a limit the pool may take before pages go to the swap file.
#[derive(Debug, Clone, Copy)]
pub struct PoolShare {
    /// The thread writes back above this.
    start: u64,
    /// It stops below this.
    stop: u64,
    /// The reclaimer writes back itself above this.
    hard: u64,
}

impl PoolShare {
    /// Half of the limit.
    pub fn of(limit: u64) -> PoolShare {
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
    /// What the pool may take, if there is somewhere else to go.
    fn pool_share(&self) -> Option<PoolShare> {
        let file = self.file.as_ref().filter(|file| !file.is_closed())?;
        let usage = file.usage();
        if usage.used_bytes == usage.size_bytes {
            return None;
        }
        self.limit.total_bytes.map(PoolShare::of)
    }

    /// For the reclaimer, before it stores more: keeps the pool within its share.
    pub fn hold_pool_limit(&self, scratch: &mut Scratch) {
        let share = self.pool_share();
        self.compression.note_outlet(share.is_some());
        let Some(share) = share else {
            return;
        };
        let _making_way = self.resources.priority.yield_to_programs();
        if self.resources.swap.pool_bytes() > share.start {
            self.background.notify();
        }
        self.shrink_pool(share.hard, scratch);
    }

    /// Makes the pool smaller than `target`, as far as that can be done.
    fn shrink_pool(&self, target: u64, scratch: &mut Scratch) {
        while self.resources.swap.pool_bytes() > target {
            if self.resources.gather.help(HELP_SLOTS) > 0 {
                continue;
            }
            let now = self.resources.milliseconds();
            if now < self.file_paused_until.load(Ordering::Relaxed) {
                break;
            }
            let excess = self.resources.swap.pool_bytes() - target;
            let report = self
                .resources
                .swap
                .write_back(excess.min(WRITE_BACK_BYTES), scratch);
            self.note_trouble(&report);
            // What left the pool is to be seen in its size.
            self.resources.swap.trim_spare();
            if report.moved == 0 {
                let until = now + FILE_PAUSE.as_millis() as u64;
                self.file_paused_until.store(until, Ordering::Relaxed);
                break;
            }
        }
    }

    /// Warns once if the file does not take what it should.
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
                "the swap file takes no more pages for now: {reason}; they stay in memory (this is \
                 said once)"
            );
        }
    }

    /// Brings all pages back from the swap file and uses it no more. Returns how many came back,
    /// or those that are still there if they do not fit into the limit: the file then stays in use.
    pub fn swap_off(&self) -> Result<u64, SwapOffError> {
        let file = self.file.as_ref().ok_or(SwapOffError::NoFile)?;
        // One that comes to nothing uses the file again, whatever another was told meanwhile.
        let _alone = lock(&self.swapping_off);
        let before = self.resources.swap.pages_in(TierKind::File);
        file.set_closed(true);
        let mut scratch = Scratch::new();
        let mut more = u64::MAX;
        loop {
            let report = self
                .resources
                .swap
                .evacuate(TierKind::File, &mut scratch, || self.has_room());
            let left = self.resources.swap.pages_in(TierKind::File);
            if left == 0 {
                return Ok(before);
            }
            // Pages that were on their way there while it was closed may be left behind.
            if !report.finished || left >= more {
                file.set_closed(false);
                return Err(match report.failed {
                    0 => SwapOffError::NoRoom { pages: left },
                    _ => SwapOffError::Unreadable { pages: left },
                });
            }
            more = left;
        }
    }

    /// Whether the pool can grow without pressing the resident pages to the wall.
    fn has_room(&self) -> bool {
        let taken = self.resources.swap.pool_bytes() + self.metadata_bytes();
        self.limit
            .total_bytes
            .is_none_or(|limit| taken < limit - limit / 8)
    }
}

/// Why a swap file is still in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwapOffError {
    /// There is none.
    #[error("this run has no swap file")]
    NoFile,
    /// The pages do not fit into the limit.
    #[error("{pages} pages of the swap file do not fit under the limit; it stays in use")]
    NoRoom {
        /// Pages that are still in the file.
        pages: u64,
    },
    /// Some pages cannot be read or stored now.
    #[error("{pages} pages of the swap file cannot be brought back now; it stays in use")]
    Unreadable {
        /// Pages that are still in the file.
        pages: u64,
    },
}

/// The background thread.
pub struct Background {
    group: Arc<Group>,
    scratch: Scratch,
    plan: ScanPlan,
    /// Slots that should have been looked at by now.
    owed: f64,
    scanned: Instant,
    compacted: Instant,
}

impl Background {
    pub fn new(group: Arc<Group>, options: &Options) -> Background {
        let write_back = options
            .writeback_after
            .filter(|_| options.swap_file.is_some());
        Background {
            group,
            scratch: Scratch::new(),
            plan: ScanPlan::new(options.recompress_after, write_back),
            owed: 0.0,
            scanned: Instant::now(),
            compacted: Instant::now(),
        }
    }

    /// Runs until the group stops.
    pub fn run(&mut self) {
        // Programs and their faults go first.
        memfold_sys::thread::set_nice(10);
        while !self.group.stopping.load(Ordering::Relaxed) {
            self.group.background.wait(self.plan.tick());
            if let Some(share) = self.group.pool_share()
                && self.group.resources.swap.pool_bytes() > share.start
            {
                self.group.shrink_pool(share.stop, &mut self.scratch);
            }
            self.scan();
            self.compact();
        }
    }

    /// Looks at the pages whose turn it is.
    fn scan(&mut self) {
        let elapsed = self.scanned.elapsed();
        self.scanned = Instant::now();
        let Some(period) = self.plan.period else {
            return;
        };
        let swap = &self.group.resources.swap;
        // The end of the space takes a step too.
        let length = (swap.scan_length() + SCAN_SLOTS) as f64;
        let part = elapsed.as_secs_f64() / period.as_secs_f64();
        self.owed = (self.owed + part * length).min(length);
        while self.owed >= SCAN_SLOTS as f64 && !self.group.stopping.load(Ordering::Relaxed) {
            self.owed -= SCAN_SLOTS as f64;
            let report = swap.scan(self.plan.policy, SCAN_SLOTS, &mut self.scratch);
            self.group.note_trouble(&report);
        }
    }

    /// Packs the pool where much of it is waste.
    fn compact(&mut self) {
        if self.compacted.elapsed() < COMPACT_INTERVAL {
            return;
        }
        self.compacted = Instant::now();
        let swap = &self.group.resources.swap;
        let wasted = || {
            let pool = swap.pool_bytes();
            let waste = pool.saturating_sub(swap.root_group().usage().pool);
            waste > WASTE_FLOOR && waste > pool / 4
        };
        if wasted() {
            swap.compact(|| !self.group.stopping.load(Ordering::Relaxed));
            if wasted() {
                swap.trim();
            }
        }
    }
}

/// How often the space is gone through, and at what age pages move.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ScanPlan {
    /// Once through the space; `None` if nothing is to be looked for.
    period: Option<Duration>,
    policy: ScanPolicy,
}

impl ScanPlan {
    /// For the times for which a page must have stayed out at least.
    fn new(recompress: Option<Duration>, write_back: Option<Duration>) -> ScanPlan {
        let both = || recompress.iter().chain(&write_back);
        let period = both().min().map(|shortest| {
            let longest = both().max().unwrap_or(shortest);
            // Ages are told apart only so far.
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
mod tests {
    use super::*;

    #[test]
    fn pages_are_as_old_as_was_asked_for_before_they_move() {
        let seconds = Duration::from_secs;
        let plan = ScanPlan::new(Some(seconds(60)), Some(seconds(600)));
        assert_eq!(plan.period, Some(seconds(60)));
        assert_eq!(plan.policy.recompress, Some(1));
        assert_eq!(plan.policy.write_back, Some(10));
        for (recompress, write_back) in [(1, 3600), (3600, 1), (7, 50), (1, 1)] {
            let plan = ScanPlan::new(Some(seconds(recompress)), Some(seconds(write_back)));
            let period = plan.period.unwrap();
            for (after, age) in [
                (recompress, plan.policy.recompress),
                (write_back, plan.policy.write_back),
            ] {
                // A page of age n was looked at n times before, a period apart.
                let least = period * u32::from(age.unwrap());
                assert!(least >= seconds(after), "{after} s: {plan:?}");
                assert!(least < seconds(after) + 2 * period, "{after} s: {plan:?}");
            }
        }
        assert_eq!(ScanPlan::new(None, None).period, None);
        assert_eq!(
            ScanPlan::new(None, Some(seconds(5))).policy.recompress,
            None
        );
    }

    #[test]
    fn the_pool_is_held_below_half_of_the_limit() {
        for limit in [16 << 20, 1 << 30, 1 << 40] {
            let share = PoolShare::of(limit);
            assert!(share.stop < share.start && share.start < share.hard);
            assert_eq!(share.hard, limit / 2);
            assert!(share.stop > limit / 3);
        }
    }
}
