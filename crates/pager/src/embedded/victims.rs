//! Choosing victims, and what is remembered of them: two lists, as in `run` (`replacement.rs`).
//!
//! ```text
//!  marked cold ─► oldest of the inactive list ─► samples of active pages ─► active pages, from the clock hand on
//! ```
//!
//! The lists are one engine's, for all of its areas; ranges on them are addresses. Locks: the hand's, in it the
//! replacement's, in it those of areas and pins. A fault that finds the replacement's taken lets its pages become active.

use super::account::HeldBatch;
use super::area::Area;
use super::dues::Dues;
use super::engine_state::EngineState;
use super::hand::Hand;
use super::limits::BATCH;
use super::worker::{Claim, Worker};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::replacement::{Age, List, Replacement, Shadow};
use crate::sync::lock;
use std::ops::Range;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

/// Pages that stay on the inactive list at least: what is read ahead of two streams must not leave before it is used.
const RESERVE: u64 = 256;
/// Ranges on the inactive list, at most. More take more memory: 16 bytes each.
const RANGES: usize = 4096;

/// What becomes of pages that were used lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Young {
    /// They are claimed like others.
    Taken,
    /// They are passed over, and older at the next pass.
    Spared,
}

/// The lists of an engine.
pub(super) fn new_replacement() -> Replacement {
    Replacement::with_fixed_list(RESERVE, RANGES)
}

impl EngineState {
    /// Claims victims for the worker, all of one area. They are held before another thread looks for some.
    pub(super) fn choose_victims(&self, worker: &mut Worker) -> Option<(Arc<Area>, HeldBatch<'_>)> {
        worker.clear_victims();
        let mut hand = lock(&self.hand);
        let area = self.claim_next(&mut hand, worker)?;
        Some((area, self.account.hold_batch()))
    }

    fn claim_next(&self, hand: &mut Hand, worker: &mut Worker) -> Option<Arc<Area>> {
        while let Some((area, range)) = hand.cold.pop_front() {
            let next = claim(&area, range.clone(), (Young::Taken, BATCH), worker);
            if next < range.end {
                hand.cold.push_front((area.clone(), next..range.end));
            }
            if !worker.victims.is_empty() {
                return Some(area);
            }
        }
        if hand.dues.are_paid() {
            let resident = self.account.resident_pages();
            let quota = lock(&self.replacement).quota(BATCH, resident, resident);
            hand.dues = Dues::of(quota, BATCH);
        }
        if hand.dues.inactive.victims > 0 {
            if let Some(area) = self.claim_inactive(hand, worker) {
                let taken = worker.victims.len();
                worker.samples = hand.dues.inactive.pay(taken, List::Inactive);
                return Some(area);
            }
            hand.dues.leave_to_active();
        }
        let area = match self.claim_samples(hand, worker) {
            Some(area) => area,
            None => self.claim_active(hand, worker)?,
        };
        let taken = worker.victims.len();
        worker.samples = hand.dues.active.pay(taken, List::Active);
        Some(area)
    }

    /// Claims the oldest pages of the inactive list, as far as they are of one area.
    fn claim_inactive(&self, hand: &Hand, worker: &mut Worker) -> Option<Arc<Area>> {
        let most = hand.dues.inactive.victims.min(BATCH);
        let mut replacement = lock(&self.replacement);
        let mut chosen: Option<Arc<Area>> = None;
        while worker.victims.len() < most
            && let Some(range) = replacement.take_inactive()
        {
            // It may be unmapped by now.
            let Some(area) = self.area_at(range.start.address() as usize) else {
                continue;
            };
            if chosen.as_ref().is_some_and(|one| !Arc::ptr_eq(one, &area)) {
                replacement.give_back(range);
                break;
            }
            let Some(first) = area.page_at(range.start.address() as usize) else {
                continue;
            };
            let end = area.pages.min(first + range.pages() as usize);
            let next = claim(&area, first..end, (Young::Spared, most), worker);
            if next < end {
                replacement.give_back(pages_of(&area, next..end));
            }
            if !worker.victims.is_empty() {
                chosen = Some(area);
            }
        }
        replacement.activate_oldest();
        chosen
    }

    /// Claims the samples of active pages that are due while the inactive list leaves, from a random page on.
    fn claim_samples(&self, hand: &mut Hand, worker: &mut Worker) -> Option<Arc<Area>> {
        let due = hand.dues.active.samples;
        if due == 0 || hand.dues.active.victims > due {
            // Others leave beside them.
            return None;
        }
        let random = lock(&self.replacement).random_below(u64::MAX);
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        let pages: u64 = areas.iter().map(|area| area.pages as u64).sum();
        let mut left = random.checked_rem(pages)?;
        let area = areas.iter().find(|area| {
            let is_there = left < area.pages as u64;
            left -= if is_there { 0 } else { area.pages as u64 };
            is_there
        })?;
        claim(
            area,
            left as usize..area.pages,
            (Young::Spared, due),
            worker,
        );
        (!worker.victims.is_empty()).then(|| area.clone())
    }

    /// Claims active pages from the clock hand on.
    fn claim_active(&self, hand: &mut Hand, worker: &mut Worker) -> Option<Arc<Area>> {
        let most = hand.dues.active.victims.clamp(1, BATCH);
        let areas = self.areas.read().unwrap_or_else(PoisonError::into_inner);
        // The first revolution makes young pages old, the second claims them.
        for _ in 0..2 * areas.len() + 3 {
            let index = hand.area;
            let Some(area) = areas.get(index) else {
                (hand.area, hand.page) = (0, 0);
                continue;
            };
            if area.resident() > 0 {
                let rest = hand.page.min(area.pages)..area.pages;
                hand.page = claim(area, rest, (Young::Spared, most), worker);
            } else {
                hand.page = area.pages;
            }
            if hand.page >= area.pages {
                (hand.area, hand.page) = (index + 1, 0);
            }
            if !worker.victims.is_empty() {
                return Some(area.clone());
            }
        }
        None
    }

    /// What is remembered of a victim of the worker that leaves now.
    pub(super) fn shadow_of(&self, worker: &Worker, victim: usize) -> Shadow {
        Shadow::new(Age(self.evictions.load(Relaxed)), worker.samples.of(victim))
    }

    /// Notes that a victim of the worker has left.
    pub(super) fn note_evicted(&self, worker: &Worker, victim: usize) {
        let now = Age(self.evictions.fetch_add(1, Relaxed).wrapping_add(1));
        if let Some(list) = worker.samples.of(victim) {
            lock(&self.replacement).evicted(now, list);
        }
    }

    /// Notes that the claimed pages come back, the first of them on demand. Returns the list that they go on.
    pub(super) fn note_refault(&self, claims: &[Claim]) -> List {
        let Some((first, others)) = claims.split_first() else {
            return List::Active;
        };
        let Ok(mut replacement) = self.replacement.try_lock() else {
            return List::Active;
        };
        let now = Age(self.evictions.load(Relaxed));
        for claim in others {
            replacement.read_ahead(claim.shadow, now);
        }
        replacement.refault(first.shadow, claims.len(), now)
    }

    /// Puts pages that were brought in on the inactive list.
    pub(super) fn add_inactive(&self, area: &Area, pages: Range<usize>) {
        lock(&self.replacement).add_inactive(pages_of(area, pages));
    }
}

fn pages_of(area: &Area, pages: Range<usize>) -> PageRange {
    let page = |index: usize| VirtualPage::containing(area.address(index) as u64);
    PageRange {
        start: page(pages.start),
        end: page(pages.end),
    }
}

/// Claims victims of an area, until the worker has `most`. Returns where to go on.
pub(super) fn claim(
    area: &Area,
    range: Range<usize>,
    (young, most): (Young, usize),
    worker: &mut Worker,
) -> usize {
    area.sweep(range, young == Young::Taken, |page, entry, state| {
        if worker.victims.len() >= most {
            return false;
        }
        let place = worker.place(worker.victims.len());
        if entry.replace(state, PageState::Moving(place)) {
            worker.victims.push(page);
        }
        true
    })
}
