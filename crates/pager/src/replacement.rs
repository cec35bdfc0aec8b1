//! Page replacement: which resident pages leave first.
//!
//! Two lists, as in Linux. Pages that are touched for the first time are *active*; the clock hand takes
//! them in address order. Pages that refault go to the end of the *inactive* list, which is first in,
//! first out and short. Its oldest pages either leave before any active page, or become active and the
//! hand goes on. The first is right where programs go round more memory than they may keep: active
//! pages then stay for the whole way round, where first in, first out would lose each of them just
//! before its use. The second is right where pages that were used lately are used again soon.
//!
//! Which of the two it is follows from a measurement. Of both lists one page in `SAMPLED` is evicted
//! as a sample, whatever the choice, and its *shadow* says so until it refaults. A list's **refault
//! rate** is the number of its samples that refaulted, divided by the time that its samples spent
//! evicted (the estimate of the hazard of an exponential distribution, to which evicted pages that were
//! not missed yet contribute). Time is counted in evictions. The list with the lower rate is evicted.
//! Active samples are taken at random places while the inactive list leaves: the pages from the hand on are neighbours, and
//! alike. Where many inactive samples refault soon, the list is too short for what is used again, and active pages leave at
//! once, whatever the rates are: they follow later.
//!
//! Each active page that leaves as a sample is replaced by a refaulting one, of those with the shorter
//! refault distances; so active pages that are not used any more go.
//!
//! The lists and the shadows are those of Linux's `mm/workingset.c`; to insert refaulting pages where
//! they leave next is the bimodal insertion of Qureshi et al., "Adaptive Insertion Policies for High
//! Performance Caching" (2007).

use crate::page::PageRange;
use std::collections::VecDeque;

/// One victim in this many is a sample, of either list. More samples find a change of pattern earlier,
/// and evict more pages of the list that is to be kept.
const SAMPLED: usize = 16;
/// Evictions after which a sample or an observation counts for 1/e, as a multiple of the resident
/// pages. A larger multiple averages over more ways round and finds a change of pattern later.
const MEMORY: f32 = 2.0;
/// The inactive list leaves first until its refault rate is above the active one's by this factor; then
/// the active list does until it is below by [`KEEP_FACTOR`]. Larger factors change sides less often.
const FIFO_FACTOR: f32 = 1.3;
/// See [`FIFO_FACTOR`].
const KEEP_FACTOR: f32 = 1.1;
/// A difference of rates that is within chance, as refaults per resident size of evictions.
const NOISE: f32 = 0.02;
/// A refault is soon within this part (1/n) of the resident size, in evictions.
const SOON_DIVISOR: f32 = 8.0;
/// Evictions after which a sample counts for 1/e in what refaults soon, as a part (1/n) of the resident size.
const SOON_MEMORY_DIVISOR: f32 = 4.0;
/// Part of the inactive samples that refaults soon where the list is too short. A larger one finds a working set that has
/// changed later, and takes fewer scans for one.
const SOON_PART: f32 = 0.25;
/// Part (1/n) of the resident pages that stay on the inactive list. A larger divisor keeps more active
/// pages and evicts sooner what was brought in.
const RESERVE_DIVISOR: u64 = 48;
/// Pages that stay on it at least, in `run`: several windows of readahead.
const RESERVE_AT_LEAST: u64 = 64;
/// Active pages that left and were not replaced yet, at most.
const VACANCIES_MAX: u32 = 64;
/// Ranges on the inactive list, at most. The oldest become active. More take more memory.
const RANGES_MAX: usize = 1 << 14;

/// One of the two lists of resident pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    /// All pages that are not on the other one.
    Active,
    /// Pages that were brought in lately.
    Inactive,
}

/// Number of evictions so far, which is the clock of refault distances. It wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Age(pub u32);

/// What is remembered of an evicted page: when it left, and whether as a sample. 24 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shadow(u32);

/// Bits of a shadow.
pub(crate) const SHADOW_BITS: u32 = 24;
const SAMPLE_BITS: u32 = 2;
const SAMPLE_MASK: u32 = (1 << SAMPLE_BITS) - 1;
/// Evictions per unit of a shadow's age: it wraps after 64 GiB of 4 KiB pages.
const AGE_UNIT: u32 = 4;
const AGE_MASK: u32 = (1 << (SHADOW_BITS - SAMPLE_BITS)) - 1;

impl Shadow {
    /// The shadow of a page that is evicted now, perhaps as a sample of a list.
    pub(crate) fn new(now: Age, sample: Option<List>) -> Shadow {
        let sample = match sample {
            None => 0,
            Some(List::Active) => 1,
            Some(List::Inactive) => 2,
        };
        Shadow(((now.0 / AGE_UNIT) & AGE_MASK) << SAMPLE_BITS | sample)
    }

    /// The shadow of a copy of the page: one sample stays one.
    pub(crate) fn without_sample(self) -> Shadow {
        Shadow(self.0 & !SAMPLE_MASK)
    }

    /// The packed bits.
    pub(crate) fn into_raw(self) -> u32 {
        self.0
    }

    /// The inverse of [`Shadow::into_raw`].
    pub(crate) fn from_raw(raw: u32) -> Shadow {
        Shadow(raw & ((1 << SHADOW_BITS) - 1))
    }

    fn sample(self) -> Option<List> {
        match self.0 & SAMPLE_MASK {
            1 => Some(List::Active),
            2 => Some(List::Inactive),
            _ => None,
        }
    }

    /// Refault distance: evictions since this one.
    pub(crate) fn distance(self, now: Age) -> u32 {
        ((now.0 / AGE_UNIT).wrapping_sub(self.0 >> SAMPLE_BITS) & AGE_MASK) * AGE_UNIT
    }
}

/// Samples of one list, all weighted by age.
#[derive(Debug, Clone, Copy, Default)]
struct Samples {
    /// Samples that are still evicted.
    evicted: f32,
    /// The time that samples spent evicted.
    exposure: f32,
    /// Samples that refaulted.
    refaulted: f32,
    /// Samples of late, refaulted or not, and of them what refaulted soon.
    late: f32,
    soon: f32,
}

impl Samples {
    fn pass(&mut self, evictions: f32, memory: f32) {
        let left = (-evictions / memory).exp();
        let spent = self.evicted * memory * (1.0 - left);
        self.exposure = self.exposure * left + spent;
        self.refaulted *= left;
        self.evicted *= left;
        let left = (-evictions / memory * MEMORY * SOON_MEMORY_DIVISOR).exp();
        self.late *= left;
        self.soon *= left;
    }

    /// Whether the list is too short: more than a part `SOON_PART` of the late samples refaulted soon.
    fn is_too_short(&self) -> bool {
        const ENOUGH: f32 = 4.0;
        self.late > ENOUGH && self.soon > self.late * SOON_PART + 1.0
    }

    fn rate(&self) -> f32 {
        if self.exposure < 1.0 {
            0.0
        } else {
            self.refaulted / self.exposure
        }
    }
}

/// Of which lists the next victims are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Victims from the inactive list, if it has as many above its reserve.
    pub inactive: usize,
    /// How many of the victims of each list are samples.
    pub samples: usize,
}

/// The replacement state of one address space.
#[derive(Debug, Default)]
pub(crate) struct Replacement {
    active: Samples,
    inactive: Samples,
    /// When the samples were last weighted.
    weighted: Age,
    /// Resident pages by which ages are measured, at least 1.
    size: u32,
    /// Active pages leave first.
    is_fifo: bool,
    /// Victims that no sample was taken for yet.
    unsampled: usize,
    /// Active samples that left and were not replaced.
    vacancies: u32,
    /// Refault distance up to which a page takes a vacancy.
    near: f32,
    list: InactiveList,
    random: u64,
}

impl Replacement {
    /// With an inactive list of which `reserve` pages stay at least, and which allocates nothing any more: room for
    /// `ranges` ranges is taken now, beyond which the oldest become active.
    pub(crate) fn with_fixed_list(reserve: u64, ranges: usize) -> Replacement {
        Replacement {
            list: InactiveList {
                ranges: VecDeque::with_capacity(ranges),
                ranges_max: ranges,
                reserve_at_least: reserve,
                ..InactiveList::default()
            },
            ..Replacement::default()
        }
    }

    /// Whether active pages leave first, and the pages that outgrow the inactive list become active.
    pub(crate) fn is_fifo(&self) -> bool {
        self.is_fifo
    }

    /// Shares `wanted` victims among the lists. `own` resident pages are the address space's, `all` those
    /// under the limit.
    pub(crate) fn quota(&mut self, wanted: usize, own: u64, all: u64) -> Quota {
        self.size = u32::try_from(all).unwrap_or(u32::MAX).max(1);
        let reserve = (own / RESERVE_DIVISOR).max(self.list.reserve_at_least);
        self.list.reserve = reserve.min(own / 4);
        self.unsampled += wanted;
        let samples = (self.unsampled / SAMPLED).min(wanted / 2);
        self.unsampled -= (samples * SAMPLED).min(self.unsampled);
        let inactive = if self.is_fifo {
            samples
        } else {
            wanted - samples
        };
        Quota { inactive, samples }
    }

    /// A page was evicted as a sample of a list.
    pub(crate) fn evicted(&mut self, now: Age, list: List) {
        self.pass(now);
        let samples = self.samples(list);
        samples.evicted += 1.0;
        samples.late += 1.0;
        if list == List::Active && !self.is_fifo {
            self.vacancies = (self.vacancies + 1).min(VACANCIES_MAX);
        }
    }

    /// A page refaults, and `pages` are brought in. Returns the list that they belong on.
    pub(crate) fn refault(&mut self, shadow: Shadow, pages: usize, now: Age) -> List {
        self.leave_samples(shadow, now, true);
        let distance = shadow.distance(now) as f32;
        let pages = pages as u32;
        if self.vacancies < pages {
            return List::Inactive;
        }
        // `near` follows the distances such that as many pages are near as vacancies arise.
        if distance <= self.near {
            self.vacancies -= pages;
            self.near *= 0.98;
            List::Active
        } else {
            self.near = (self.near * 1.01 + 1.0).min(4.0 * self.size as f32 + 64.0);
            List::Inactive
        }
    }

    /// A page came back without having been asked for, by readahead.
    pub(crate) fn read_ahead(&mut self, shadow: Shadow, now: Age) {
        self.leave_samples(shadow, now, false);
    }

    fn samples(&mut self, list: List) -> &mut Samples {
        match list {
            List::Active => &mut self.active,
            List::Inactive => &mut self.inactive,
        }
    }

    /// If the page was a sample, it is evicted no longer.
    fn leave_samples(&mut self, shadow: Shadow, now: Age, is_refault: bool) {
        let Some(list) = shadow.sample() else {
            return;
        };
        self.pass(now);
        let memory = self.memory();
        let samples = self.samples(list);
        let weight = (-(shadow.distance(now) as f32) / memory).exp();
        samples.evicted = (samples.evicted - weight).max(0.0);
        if is_refault {
            samples.refaulted += weight;
            if (shadow.distance(now) as f32) < memory / MEMORY / SOON_DIVISOR {
                samples.soon += 1.0;
            }
        }
        self.decide();
    }

    fn memory(&self) -> f32 {
        self.size.max(1) as f32 * MEMORY
    }

    fn pass(&mut self, now: Age) {
        let evictions = now.0.wrapping_sub(self.weighted.0);
        // Ages of several threads may be out of order by a few.
        if evictions == 0 || evictions > u32::MAX / 2 {
            return;
        }
        let memory = self.memory();
        self.active.pass(evictions as f32, memory);
        self.inactive.pass(evictions as f32, memory);
        self.weighted = now;
    }

    fn decide(&mut self) {
        if self.inactive.is_too_short() {
            self.is_fifo = true;
            return;
        }
        let noise = NOISE / self.size.max(1) as f32;
        let (active, inactive) = (self.active.rate(), self.inactive.rate());
        self.is_fifo = if self.is_fifo {
            inactive >= active * KEEP_FACTOR + noise / 2.0
        } else {
            inactive > active * FIFO_FACTOR + noise
        };
    }

    /// A number below `end`, which is not 0: where the next samples of active pages are taken. (Knuth's MMIX generator.)
    pub(crate) fn random_below(&mut self, end: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    /// Pages that were brought in go to the end of the inactive list.
    pub(crate) fn add_inactive(&mut self, range: PageRange) {
        self.list.push(range);
    }

    /// Takes the oldest range of the inactive list, if the list is above its reserve.
    pub(crate) fn take_inactive(&mut self) -> Option<PageRange> {
        if self.list.pages > self.list.reserve {
            self.list.pop()
        } else {
            None
        }
    }

    /// Gives a range back that was not evicted.
    pub(crate) fn give_back(&mut self, range: PageRange) {
        if self.list.ranges.len() < self.list.ranges_max {
            self.list.pages += range.pages();
            self.list.ranges.push_front(range);
        }
    }

    /// Where active pages leave first: what outgrows the inactive list becomes active.
    pub(crate) fn activate_oldest(&mut self) {
        while self.is_fifo && self.take_inactive().is_some() {}
    }
}

/// Ranges of pages in the order in which they were brought in. A page may have left since, or be there
/// twice.
#[derive(Debug)]
struct InactiveList {
    ranges: VecDeque<PageRange>,
    ranges_max: usize,
    pages: u64,
    /// Pages that stay.
    reserve: u64,
    reserve_at_least: u64,
}

impl Default for InactiveList {
    fn default() -> Self {
        InactiveList {
            ranges: VecDeque::new(),
            ranges_max: RANGES_MAX,
            pages: 0,
            reserve: 0,
            reserve_at_least: RESERVE_AT_LEAST,
        }
    }
}

impl InactiveList {
    fn push(&mut self, range: PageRange) {
        // First, so that a list of a fixed capacity never grows.
        if self.ranges.len() >= self.ranges_max {
            self.pop();
        }
        self.pages += range.pages();
        self.ranges.push_back(range);
    }

    fn pop(&mut self) -> Option<PageRange> {
        let range = self.ranges.pop_front()?;
        self.pages -= range.pages();
        Some(range)
    }
}

#[cfg(all(test, not(simulated)))]
mod tests;
