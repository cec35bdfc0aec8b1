//! What address spaces share since a fork: how much of it is resident, and what of it is stored.
//!
//! Two processes share a page after a fork until one of them writes to it, and nobody is told when
//! that happens. So how much is shared is counted now and then (the kernel walks the page tables
//! for it), and in between estimated from above: a page that stops being shared costs its process a
//! minor fault, so as many faults as there were since, at most as many pages are shared no more.
//!
//! A page that both sides page out is stored once: whoever comes second finds the slot of a
//! relative at the same address, and takes a count of it if its contents are the same.

use crate::address_space::AddressSpace;
use crate::group::{Group, lock};
use crate::page::VirtualPage;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// A count is followed by a pause of so many times what it took.
const PAUSE_FACTOR: u32 = 12;
const SHORTEST_PAUSE: Duration = Duration::from_millis(3);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// Slots of relatives that a page is compared with, at most.
const CANDIDATES: usize = 3;
/// How long storing waits for a relative's gate before it does without.
const PATIENCE: Duration = Duration::from_micros(500);

/// Address spaces that came from one by forks.
#[derive(Default)]
pub struct Family {
    members: Mutex<Vec<Weak<AddressSpace>>>,
}

impl Family {
    /// Adds an address space.
    pub fn join(&self, space: &Arc<AddressSpace>) {
        let mut members = lock(&self.members);
        members.retain(|member| member.strong_count() > 0);
        if !members
            .iter()
            .any(|member| member.as_ptr() == Arc::as_ptr(space))
        {
            members.push(Arc::downgrade(space));
        }
    }

    /// The others that live, the youngest first: the nearest relatives, as a rule.
    fn others(&self, than: &AddressSpace) -> Vec<Arc<AddressSpace>> {
        let members = lock(&self.members);
        let living = members.iter().rev().filter_map(Weak::upgrade);
        living
            .filter(|member| member.id != than.id && !member.is_dead())
            .collect()
    }
}

/// Slots in which relatives keep what may be the same pages; a count of each is held.
pub struct Kin {
    candidates: Vec<Vec<Slot>>,
}

impl Kin {
    /// Looks at the same addresses in the relatives of `space`. No gate may be held.
    pub fn find(space: &AddressSpace, pages: impl Iterator<Item = VirtualPage>) -> Kin {
        let pages: Vec<VirtualPage> = pages.collect();
        let mut candidates = vec![Vec::new(); pages.len()];
        if !space.forked.load(Ordering::Relaxed) {
            return Kin { candidates };
        }
        for relative in space.family.others(space) {
            let swapped = |page: &VirtualPage| relative.table.swapped_slot(*page).is_some();
            if !pages.iter().any(swapped) {
                continue;
            }
            // While the gate is held alone, a slot that a page state names stays that page's.
            let Ok(_gate) = relative.exclusive_within(PATIENCE) else {
                continue;
            };
            for (page, found) in pages.iter().zip(&mut candidates) {
                if found.len() < CANDIDATES
                    && let Some(slot) = relative.table.swapped_slot(*page)
                    && !found.contains(&slot)
                    && space.group().swap.duplicate(slot).is_ok()
                {
                    found.push(slot);
                }
            }
        }
        Kin { candidates }
    }

    /// The slot that holds the same as `contents`, for the page of that index; its count is the
    /// caller's now.
    pub fn take(
        &mut self,
        index: usize,
        contents: &Page,
        group: &Group,
        scratch: &mut Scratch,
    ) -> Option<Slot> {
        let mut buffer = [0; PAGE_SIZE];
        let candidates = &mut self.candidates[index];
        // What cannot be read is stored anew; the swap space counts the error.
        let same = candidates.iter().position(|slot| {
            group.swap.load(*slot, &mut buffer, scratch).is_ok() && buffer == *contents
        })?;
        Some(candidates.swap_remove(same))
    }

    /// Gives back what was not taken.
    pub fn release(self, group: &Group) {
        let spare: Vec<Slot> = self.candidates.into_iter().flatten().collect();
        group.swap.release_bulk(&spare);
    }
}

/// Counts how many resident pages are in more than one process.
pub struct SharingCount {
    counted: Instant,
    pause: Duration,
    /// Minor faults of each address space when last looked at.
    faults: HashMap<u64, u64>,
    /// Faults since the last count.
    since: u64,
}

impl Default for SharingCount {
    fn default() -> Self {
        SharingCount {
            counted: Instant::now(),
            pause: SHORTEST_PAUSE,
            faults: HashMap::new(),
            since: 0,
        }
    }
}

impl SharingCount {
    /// Brings the group's count of shared pages up to date.
    pub fn update(&mut self, group: &Group, spaces: &[Arc<AddressSpace>]) {
        let forked: Vec<&Arc<AddressSpace>> = spaces
            .iter()
            .filter(|space| space.forked.load(Ordering::Relaxed) && !space.has_left())
            .collect();
        if forked.len() < 2 {
            self.faults.clear();
            group.set_shared_pages(0);
            return;
        }
        let members = self.faults.len();
        let mut faults = HashMap::with_capacity(forked.len());
        let mut grown = 0;
        for space in &forked {
            let Some(Ok(now)) = space.inspector().map(|inspector| inspector.minor_faults()) else {
                continue;
            };
            grown += now
                - self
                    .faults
                    .get(&space.id)
                    .map_or(now, |then| now.min(*then));
            faults.insert(space.id, now);
        }
        let changed =
            faults.len() != members || faults.keys().any(|id| !self.faults.contains_key(id));
        self.faults = faults;
        self.since += grown;
        group.lower_shared_pages(grown);
        if (self.since > 0 || changed) && self.counted.elapsed() >= self.pause {
            self.count(group, &forked);
        }
    }

    fn count(&mut self, group: &Group, forked: &[&Arc<AddressSpace>]) {
        let began = Instant::now();
        let mut shared = 0;
        for space in forked {
            let Some(inspector) = space.inspector() else {
                // Made just now: what it has is its parent's, too.
                shared += space.resident_pages() as u64 / 2;
                continue;
            };
            // The one right behind the other, so that both speak of the same moment.
            if let (Ok(bytes), Ok(sizes)) = (inspector.proportional_bytes(), inspector.sizes()) {
                shared += sizes
                    .resident_pages
                    .saturating_sub(bytes / PAGE_SIZE as u64);
            }
        }
        group.set_shared_pages(shared);
        self.since = 0;
        self.counted = Instant::now();
        let pause = began.elapsed() * PAUSE_FACTOR;
        self.pause = pause.clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
    }
}
