//! Counting the pages that forks share.
//!
//! The kernel raises no event when COW is broken. So a thread of its own counts shared pages from time
//! to time: the kernel walks page tables for that, which takes too long for the governor. In between,
//! the governor lowers the estimate by COW breaks that are known (victims, admitted writes) and by
//! those that are possible: every COW break is a minor fault, so unexplained minor faults bound the
//! number of COW breaks.

use crate::page::bytes;
use crate::supervised::fork::family::Family;
use crate::supervised::group::{Group, Watermarks};
use crate::supervised::space::AddressSpace;
use crate::time::Instant;
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pause after a count, as a multiple of its duration. A larger factor takes less CPU time and leaves
/// the estimate inaccurate for longer.
const PAUSE_FACTOR: u32 = 12;
/// The same after a count that was invalidated, or whose uncertainty is large.
const RETRY_FACTOR: u32 = 3;
/// Bounds of the pause between two counts.
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
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

/// Lowers the estimate between counts. The governor owns it.
#[derive(Default)]
pub(crate) struct SharingWatch {
    /// Minor faults of each address space at the last sample.
    faults: HashMap<u64, u64>,
}

impl SharingWatch {
    /// Lowers the group's estimate by possible COW breaks, and requests a count if any program faulted.
    pub(crate) fn update(&mut self, group: &Group) {
        let begun = group.resources.shared.begin_count();
        let sharers = sharers(group);
        if sharers.len() < 2 {
            self.faults.clear();
            if let Some(begun) = begun {
                group.resources.shared.set(0, begun);
            }
            return;
        }
        let known = self.faults.len();
        let mut faults = HashMap::with_capacity(sharers.len());
        let (mut unknown, mut any) = (0, false);
        for space in &sharers {
            let Some(Ok(now)) = space.inspector().map(|inspector| inspector.minor_faults()) else {
                continue;
            };
            let then = self.faults.get(&space.id).copied();
            any |= then.is_none_or(|then| then != now);
            let counted = space.sampling.counted_faults.swap(0, Ordering::Relaxed);
            if let Some(then) = then {
                let faulted = now.saturating_sub(then);
                unknown += faulted.saturating_sub(counted);
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
        if let Some(begun) = begun {
            group.resources.shared.bound(most_shared(&sharers), begun);
        }
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
    pause: Duration,
}

impl SharingCount {
    /// The counter of a group.
    pub(crate) fn new(group: Arc<Group>) -> SharingCount {
        SharingCount {
            group,
            counted: Instant::now(),
            pause: SHORTEST_PAUSE,
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
            let began = Instant::now();
            due = !self.count();
            let factor = if due { RETRY_FACTOR } else { PAUSE_FACTOR };
            self.counted = Instant::now();
            self.pause = (began.elapsed() * factor).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        }
    }

    /// Pause until the next count: shorter if the estimate's uncertainty exceeds the distance between
    /// the limit and the watermark at which reclaim stops.
    fn pause_now(&self) -> Duration {
        let limit = self.group.resources.resident_limit_bytes();
        let room = limit - Watermarks::of(limit).stop;
        if bytes(self.group.resources.shared.uncertainty()) > room {
            self.pause * RETRY_FACTOR / PAUSE_FACTOR
        } else {
            self.pause
        }
    }

    /// Counts shared pages. `false` if the count was invalidated by a fork, an exit or an exec.
    fn count(&self) -> bool {
        let group = &self.group;
        let Some(begun) = group.resources.shared.begin_count() else {
            return false;
        };
        let sharers = sharers(group);
        let mut shared = 0;
        for space in &sharers {
            // Each takes the kernel a walk over page tables.
            if !group.resources.shared.is_valid(begun) {
                return false;
            }
            let Some(inspector) = space.inspector() else {
                // A new child, whose process is not known yet, shares everything with its parent.
                shared += space.resident_pages() as u64 / 2;
                continue;
            };
            // Read PSS and RSS in close succession, so that they match.
            shared += match (inspector.proportional_bytes(), inspector.sizes()) {
                (Ok(bytes), Ok(sizes)) if sizes.resident_pages > 0 => sizes
                    .resident_pages
                    .saturating_sub(bytes / PAGE_SIZE as u64),
                // The program is gone, so none of the pages charged to it are its own.
                _ => space.resident_pages() as u64,
            };
        }
        // A child whose fork event was not read yet shares pages, too.
        let forking = sharers.iter().any(|space| space.is_changing());
        !forking
            && group
                .resources
                .shared
                .set(shared.min(most_shared(&sharers)), begun)
    }
}
