//! How many pages forks share: kept up by the governor, counted by a thread of its own.
//!
//! Two processes share a page after a fork until one of them writes to it, and nobody is told when
//! that happens. So it is counted now and then (the kernel walks the page tables for it, which takes
//! milliseconds: too long for the governor, who must be in time). In between the estimate is lowered
//! by what is known (pages taken out of sharing to go out, writes that were let in), and by what may
//! be: a page that stops being shared costs its process a minor fault, so as many faults as nobody
//! here knows the reason of, at most as many pages are shared no more.

use crate::page::bytes;
use crate::supervised::fork::family::Family;
use crate::supervised::group::{Group, Watermarks};
use crate::supervised::space::AddressSpace;
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A count is followed by a pause of so many times what it took.
const PAUSE_FACTOR: u32 = 12;
/// The same for a count that did not hold, or is in doubt.
const RETRY_FACTOR: u32 = 3;
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Faults of a program that were counted before they came, at most.
const TO_COME_MOST: u64 = 1024;
/// How often the thread looks whether the group stops.
const IDLE: Duration = Duration::from_millis(200);

/// The address spaces that may share pages.
fn sharers(group: &Group) -> Vec<Arc<AddressSpace>> {
    let mut spaces = group.spaces();
    spaces.retain(|space| {
        // Whoever leaves is counted until nothing is charged to it any more.
        let counted = !space.has_left() || space.resident_pages() > 0;
        space.fork.forked.load(Ordering::Relaxed) && counted
    });
    spaces
}

/// How many pages these can share at most: what is resident of a family is no less than what is
/// resident of its largest member. (A count may take in one more, on whose exit the kernel works.)
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

/// Keeps the estimate up between counts; the governor's.
#[derive(Default)]
pub struct SharingWatch {
    /// Minor faults of each address space when last looked at.
    faults: HashMap<u64, u64>,
}

impl SharingWatch {
    /// Lowers the group's estimate by what may have happened, and calls for a count where anything
    /// has.
    pub fn update(&mut self, group: &Group) {
        let begun = group.resources.shared.begin();
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
                // Some are counted before they come, some never come.
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

/// Counts what is shared; a thread.
pub struct SharingCount {
    group: Arc<Group>,
    counted: Instant,
    pause: Duration,
}

impl SharingCount {
    pub fn new(group: Arc<Group>) -> SharingCount {
        SharingCount {
            group,
            counted: Instant::now(),
            pause: SHORTEST_PAUSE,
        }
    }

    /// Runs until the group stops.
    pub fn run(&mut self) {
        let mut due = false;
        while !self.group.stopping.load(Ordering::Relaxed) {
            due = due || self.group.wait_for_sharing(IDLE);
            if !due {
                continue;
            }
            if self.counted.elapsed() < self.pause_now() {
                std::thread::sleep(SHORTEST_PAUSE);
                continue;
            }
            let began = Instant::now();
            due = !self.count();
            let factor = if due { RETRY_FACTOR } else { PAUSE_FACTOR };
            self.counted = Instant::now();
            self.pause = (began.elapsed() * factor).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        }
    }

    /// Until the next count: shorter where the estimate may be too low by more than reclaim leaves
    /// room for.
    fn pause_now(&self) -> Duration {
        let limit = self.group.resources.resident_limit_bytes();
        let room = limit - Watermarks::of(limit).stop;
        if bytes(self.group.resources.shared.doubt()) > room {
            self.pause * RETRY_FACTOR / PAUSE_FACTOR
        } else {
            self.pause
        }
    }

    /// `false` if it does not hold.
    fn count(&self) -> bool {
        let group = &self.group;
        let Some(begun) = group.resources.shared.begin() else {
            return false;
        };
        let sharers = sharers(group);
        let mut shared = 0;
        for space in &sharers {
            let Some(inspector) = space.inspector() else {
                // Made just now: what it has is its parent's, too.
                shared += space.resident_pages() as u64 / 2;
                continue;
            };
            // The one right behind the other, so that both speak of the same moment.
            shared += match (inspector.proportional_bytes(), inspector.sizes()) {
                (Ok(bytes), Ok(sizes)) if sizes.resident_pages > 0 => sizes
                    .resident_pages
                    .saturating_sub(bytes / PAGE_SIZE as u64),
                // It is gone, and what is still counted as its is another's or nobody's.
                _ => space.resident_pages() as u64,
            };
        }
        // A child of which nothing was read yet shares, too.
        let forking = sharers.iter().any(|space| space.is_changing());
        !forking
            && group
                .resources
                .shared
                .set(shared.min(most_shared(&sharers)), begun)
    }
}
