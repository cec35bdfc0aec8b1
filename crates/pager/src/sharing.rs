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
use crate::shared_pages::Members;
use memfold_swap::{Page, Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// A count is followed by a pause of so many times what it took.
const PAUSE_FACTOR: u32 = 12;
/// The same for a count that did not hold.
const RETRY_FACTOR: u32 = 3;
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
    /// Whether there were faults, or somebody came or left, since the last count.
    due: bool,
}

impl Default for SharingCount {
    fn default() -> Self {
        SharingCount {
            counted: Instant::now(),
            pause: SHORTEST_PAUSE,
            faults: HashMap::new(),
            due: false,
        }
    }
}

/// How many pages these can share at most: what is resident of a family is no less than what is
/// resident of its largest member. (A count may take in one more, on whose exit the kernel works.)
fn most_shared(forked: &[&Arc<AddressSpace>]) -> u64 {
    let mut families: HashMap<*const Family, (u64, u64)> = HashMap::new();
    for space in forked {
        let resident = space.resident_pages() as u64;
        let (sum, largest) = families.entry(Arc::as_ptr(&space.family)).or_default();
        *sum += resident;
        *largest = resident.max(*largest);
    }
    families.values().map(|(sum, largest)| sum - largest).sum()
}

impl SharingCount {
    /// Brings the group's count of shared pages up to date.
    pub fn update(&mut self, group: &Group) {
        let members = group.shared.members();
        let spaces = group.spaces();
        let forked: Vec<&Arc<AddressSpace>> = spaces
            .iter()
            .filter(|space| {
                // Whoever leaves is counted until nothing is charged to it any more.
                let counted = !space.has_left() || space.resident_pages() > 0;
                space.forked.load(Ordering::Relaxed) && counted
            })
            .collect();
        if forked.len() < 2 {
            self.faults.clear();
            if let Some(members) = members {
                group.shared.set(0, members);
            }
            return;
        }
        let known = self.faults.len();
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
            faults.len() != known || faults.keys().any(|id| !self.faults.contains_key(id));
        self.faults = faults;
        group.shared.lower(grown);
        if let Some(members) = members {
            group.shared.bound(most_shared(&forked), members);
        }
        self.due |= grown > 0 || changed;
        if let Some(members) = members
            && self.due
            && self.counted.elapsed() >= self.pause
        {
            self.count(group, &forked, members);
        }
    }

    fn count(&mut self, group: &Group, forked: &[&Arc<AddressSpace>], members: Members) {
        let began = Instant::now();
        let mut shared = 0;
        for space in forked {
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
        let shared = shared.min(most_shared(forked));
        let forking = forked.iter().any(|space| space.is_changing());
        self.due = forking || !group.shared.set(shared, members);
        self.counted = Instant::now();
        let factor = if self.due { RETRY_FACTOR } else { PAUSE_FACTOR };
        let pause = began.elapsed() * factor;
        self.pause = pause.clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
    }
}
