//! Counting the pages that forks share.
//!
//! The kernel raises no event when COW is broken. So a thread of its own counts shared pages from time
//! to time: the kernel walks page tables for that, which takes too long for the governor. In between,
//! the governor lowers the estimate by COW breaks that are known (victims, admitted writes) and by
//! those that are possible: every COW break is a minor fault, so unexplained minor faults bound the
//! number of COW breaks, and so does the number of shared pages that are not write-protected
//! ([`SharedBounds`](super::shared_bounds::SharedBounds)).
//!
//! The page map tells which anonymous pages others map as well. To whom it also shows the numbers of their frames
//! (`CAP_SYS_ADMIN`), these are counted: a frame that several programs map is shared by all but one. For others the
//! kernel's proportional sizes say how many are shared. That takes it a walk over all that is mapped, files and shared
//! memory included, and it is valid only if no program forked or ended meanwhile.

use crate::page::bytes;
use crate::supervised::fork::family::Family;
use crate::supervised::fork::shared_estimate::CountStart;
use crate::supervised::group::Group;
use crate::supervised::reclaim::watermarks::Watermarks;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::pace::Pace;
use crate::time::Instant;
use memfold_sys::process::{Inspector, SharedFrames};
use memfold_sys::{PAGE_SIZE, thread};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pause after a count, as a multiple of its duration. A larger factor takes less CPU time and leaves
/// the estimate inaccurate for longer.
const PAUSE_FACTOR: u32 = 60;
/// The same after a count that was invalidated, or whose uncertainty is large.
const RETRY_FACTOR: u32 = 40;
/// Bounds of the pause between two counts.
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// The estimate is known well enough for so many parts of the room to be uncertain.
const EXACT: u64 = 8;
/// Longest time for which it is.
const PROPORTIONS_HOLD: Duration = Duration::from_secs(1);
/// Maximum number of a program's faults that are counted in advance. A larger value lets faults that
/// never come hide more COW breaks.
const TO_COME_MOST: u64 = 1024;
/// Interval at which the idle thread checks whether the group stops.
const IDLE: Duration = Duration::from_millis(200);

/// The address spaces that may share pages.
fn sharers(group: &Group) -> Vec<Arc<AddressSpace>> {
    let mut spaces = group.spaces();
    spaces.retain(|space| {
        // An exiting program counts until nothing is charged to it.
        let counted = !space.has_left() || space.resident_pages() > 0;
        space.fork.forked.load(Ordering::Relaxed) && counted
    });
    spaces
}

/// Upper bound of the pages that these address spaces share: a family's resident pages, shared ones
/// counted once, are at least those of its largest member. (A count may include one more address space
/// that is exiting.)
fn most_shared(sharers: &[Arc<AddressSpace>]) -> u64 {
    let mut families: HashMap<*const Family<AddressSpace>, (u64, u64)> = HashMap::new();
    for space in sharers {
        let resident = space.resident_pages() as u64;
        let (sum, largest) = families.entry(Arc::as_ptr(&space.fork.family)).or_default();
        *sum += resident;
        *largest = resident.max(*largest);
    }
    families.values().map(|(sum, largest)| sum - largest).sum()
}

/// Reading minor faults takes one part of a CPU in so many at most. A larger value lowers the estimate less often where
/// there are many programs.
const FAULTS_REST: u32 = 50;

/// Lowers the estimate between counts. The governor owns it.
pub(crate) struct SharingWatch {
    pace: Pace,
    /// Minor faults of each address space at the last sample.
    faults: HashMap<u64, u64>,
}

impl Default for SharingWatch {
    fn default() -> SharingWatch {
        SharingWatch {
            pace: Pace::new(Duration::ZERO, FAULTS_REST),
            faults: HashMap::new(),
        }
    }
}

impl SharingWatch {
    /// Lowers the group's estimate by possible COW breaks, and requests a count if any program faulted. Where there are
    /// many programs, it does so at some of the governor's samples only.
    pub(crate) fn update(&mut self, group: &Group) {
        if !self.pace.is_due(self.faults.len()) {
            return;
        }
        let (programs, took) = thread::cpu_time_of(|| {
            let begun = group.resources.shared.begin_count();
            let sharers = sharers(group);
            self.sample(group, &sharers, begun);
            sharers.len()
        });
        self.pace.note(programs, took);
    }

    fn sample(&mut self, group: &Group, sharers: &[Arc<AddressSpace>], begun: CountStart) {
        if sharers.len() < 2 {
            self.faults.clear();
            group.resources.shared.set(0, begun);
            return;
        }
        let known = self.faults.len();
        let mut faults = HashMap::with_capacity(sharers.len());
        let (mut unknown, mut any) = (0, false);
        for space in sharers {
            let Some(Ok(now)) = space.inspector().map(|inspector| inspector.minor_faults()) else {
                continue;
            };
            let then = self.faults.get(&space.id).copied();
            any |= then.is_none_or(|then| then != now);
            let counted = space.sampling.counted_faults.swap(0, Ordering::Relaxed);
            if let Some(then) = then {
                let faulted = now.saturating_sub(then);
                let unexplained = faulted.saturating_sub(counted);
                unknown += space.fork.sharing.take_copied(unexplained);
                // Faults may be counted in advance, and some never come.
                let to_come = counted.saturating_sub(faulted).min(TO_COME_MOST);
                space
                    .sampling
                    .counted_faults
                    .fetch_add(to_come, Ordering::Relaxed);
            }
            faults.insert(space.id, now);
        }
        any |= faults.len() != known;
        self.faults = faults;
        group.resources.shared.lower_at_most(unknown);
        group.resources.shared.bound(most_shared(sharers), begun);
        if any {
            group.count_sharing();
        }
    }
}

/// The thread that counts shared pages.
pub(crate) struct SharingCount {
    group: Arc<Group>,
    /// End of the last count.
    counted: Instant,
    /// End of the last count by proportional sizes.
    proportions_counted: Instant,
    pause: Duration,
    /// The frames of the last count, in order.
    frames: Vec<u64>,
}

impl SharingCount {
    /// The counter of a group.
    pub(crate) fn new(group: Arc<Group>) -> SharingCount {
        SharingCount {
            group,
            counted: Instant::now(),
            proportions_counted: Instant::now(),
            pause: SHORTEST_PAUSE,
            frames: Vec::new(),
        }
    }

    /// Runs until the group stops.
    pub(crate) fn run(&mut self) {
        let mut due = false;
        while !self.group.stopping.load(Ordering::Relaxed) {
            due = due || self.group.wait_for_sharing(IDLE);
            if !due {
                continue;
            }
            if self.counted.elapsed() < self.pause_now() {
                crate::time::sleep(SHORTEST_PAUSE);
                continue;
            }
            let began = thread::cpu_time();
            due = !self.count();
            let factor = if due { RETRY_FACTOR } else { PAUSE_FACTOR };
            self.counted = Instant::now();
            let took = thread::cpu_time().saturating_sub(began);
            self.pause = (took * factor).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        }
    }

    /// Pause until the next count: shorter if the estimate's uncertainty exceeds the distance between
    /// the limit and the watermark at which reclaim stops.
    fn pause_now(&self) -> Duration {
        if bytes(self.group.resources.shared.uncertainty()) > self.room() {
            self.pause * RETRY_FACTOR / PAUSE_FACTOR
        } else {
            self.pause
        }
    }

    /// Distance in bytes between the limit and the watermark at which reclaim stops.
    fn room(&self) -> u64 {
        let limit = self.group.resources.resident_limit_bytes();
        limit - Watermarks::of(limit).stop
    }

    /// Counts shared pages. `false` if the count was invalidated by a fork, an exit or an exec.
    fn count(&mut self) -> bool {
        let shared = &self.group.resources.shared;
        let begun = shared.begin_count();
        let sharers = sharers(&self.group);
        // A child that is being added may be listed or not.
        if !shared.is_valid(begun) {
            return false;
        }
        self.frames.clear();
        // Pages of all that others map as well, and charged ones that no frame is looked for.
        let (mut pages, mut unlisted) = (0, 0);
        let mut are_shown = true;
        for space in &sharers {
            match look_at(space, &mut self.frames) {
                Look::Found(found) => {
                    pages += found.pages;
                    are_shown &= !found.are_hidden;
                }
                // None of the pages charged to it are its own.
                Look::Absent => unlisted += space.resident_pages() as u64,
                Look::Unknown => are_shown = false,
            }
        }
        if are_shown {
            self.frames.sort_unstable();
            self.frames.dedup();
            shared.set_among_known(pages - self.frames.len() as u64 + unlisted, begun);
            return true;
        }
        self.count_proportions(&sharers, begun)
    }

    /// Counts by the proportional sizes, if the estimate is not known well enough. `false` as of [`Self::count`].
    fn count_proportions(&mut self, sharers: &[Arc<AddressSpace>], begun: CountStart) -> bool {
        let estimate = &self.group.resources.shared;
        let is_exact = bytes(estimate.uncertainty()) <= self.room() / EXACT;
        if is_exact && self.proportions_counted.elapsed() < PROPORTIONS_HOLD {
            return true;
        }
        let mut shared = 0;
        for space in sharers {
            // Each takes the kernel a walk over page tables.
            if !estimate.is_valid(begun) {
                return false;
            }
            let Some(inspector) = space.inspector() else {
                // A new child, whose process is not known yet, shares everything with its parent.
                shared += space.resident_pages() as u64 / 2;
                continue;
            };
            // Read PSS and RSS in close succession, so that they match.
            shared += match (inspector.proportional_bytes(), pages_of(&inspector)) {
                (Ok(bytes), Some(pages)) => pages.saturating_sub(bytes / PAGE_SIZE as u64),
                _ => space.resident_pages() as u64,
            };
        }
        // A child whose fork event was not read yet shares pages, too.
        let forking = sharers.iter().any(|space| space.is_changing());
        let is_valid = !forking && estimate.set(shared.min(most_shared(sharers)), begun);
        if is_valid {
            self.proportions_counted = Instant::now();
        }
        is_valid
    }
}

/// The resident pages of a program; `None` if it is gone, so that none of the pages charged to it are its own.
fn pages_of(inspector: &Inspector) -> Option<u64> {
    let sizes = inspector.sizes().ok()?;
    (sizes.resident_pages > 0).then_some(sizes.resident_pages)
}

/// What a look at a page table told.
enum Look {
    Found(SharedFrames),
    /// The program is gone, or it is a new child, whose process is not known yet and which shares everything with its parent.
    Absent,
    /// The kernel does not tell: it is older than Linux 6.7, or short of memory.
    Unknown,
}

/// Looks for shared pages of an address space in its page table, and bounds by them what may stop being shared.
fn look_at(space: &AddressSpace, frames: &mut Vec<u64>) -> Look {
    let Some(inspector) = space.inspector() else {
        return Look::Absent;
    };
    let bounds = &space.fork.sharing;
    let mut look = bounds.begin_look();
    if look.places.is_none()
        && let Ok(areas) = inspector.areas()
    {
        bounds.note_mappings(&areas);
        look = bounds.begin_look();
    }
    let before = frames.len();
    let places = look.places.as_deref();
    match places.map(|places| inspector.shared_frames(places, frames)) {
        _ if pages_of(&inspector).is_none() => {
            frames.truncate(before);
            Look::Absent
        }
        Some(Ok(mut found)) => {
            if space.resources.tracks_accesses() {
                // The bit that tells protected pages tells tracked ones there.
                found.unprotected = found.pages;
            }
            bounds.end_look(&look, &found);
            Look::Found(found)
        }
        Some(Err(_)) | None => Look::Unknown,
    }
}
