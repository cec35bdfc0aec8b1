//! Choosing the next victims.
//!
//! Pages whose COW was broken for page-out come first, then pages whose relatives' copies were paged
//! out; otherwise `replacement.rs` shares the batch among the oldest pages of the inactive list and those
//! that the clock hand meets, in address order.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::{Entry, PageState};
use crate::replacement::List;
use crate::supervised::reclaim::accesses::Sparing;
use crate::supervised::reclaim::batch::{Batch, Run};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::supervised::space::unevictable::evictable_pages;
use crate::sync::lock;
use memfold_sys::channel::RUNS_MAX;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of page states that the hand visits per batch. More finds more victims and holds the
/// gate for longer.
pub(crate) const LOOKED_AT: usize = 1 << 15;
/// Maximum number of runs of `Removed` pages resolved per batch. More resolves them earlier and holds
/// the gate for longer.
const REMOVED_RUNS: usize = 64;
/// Pages of the inactive list that one batch spares at most. More hold the gate for longer.
const MOST_SPARED: u64 = 256;
/// Fraction (1/n) of a revolution of the hand within which a refault is early. A larger divisor marks
/// fewer pages hot.
const RECENT_DIVISOR: u64 = 8;

impl Batch {
    /// Chooses up to `wanted` victims, marks them `Moving` and reserves places for them, and takes dead
    /// places to free. The hand leaves `kept` evictable pages. `now` is in seconds since the
    /// supervisor's start. Also returns whether the program is exhausted.
    pub(crate) fn plan(
        space: &AddressSpace,
        gate: &Shared<'_>,
        (wanted, kept): (usize, usize),
        now: u32,
    ) -> (Batch, bool) {
        debug_assert!(gate.is_of(space));
        let mut planner = Planner {
            space,
            gate,
            thread_ends: lock(&space.thread_ends).clone(),
            wanted,
            kept,
            now,
            looked: 0,
            met: 0,
            passed: false,
            exhausted: false,
            runs: Vec::new(),
            pages: 0,
            removed: Vec::new(),
            list: List::Active,
            samples: 0,
            sparing: None,
        };
        if wanted > 0 {
            planner.choose();
            planner.end_sparing();
            resolve_removed(space, gate, &planner.removed);
        }
        let exhausted = planner.exhausted;
        let batch = Batch {
            moves: planner.runs,
            drops: lock(&space.stage).take_dead(RUNS_MAX),
        };
        (batch, exhausted)
    }
}

/// Resolves `Removed` pages: they are resident if they were touched since, otherwise holes.
fn resolve_removed(space: &AddressSpace, gate: &Shared<'_>, ranges: &[PageRange]) {
    for range in ranges {
        let Ok(present) = space.present(*range) else {
            continue;
        };
        gate.table().visit(*range, |page, entry| {
            if let state @ PageState::Removed(_) = entry.load() {
                let is_there = present.containing(page).is_some();
                let known = if is_there {
                    PageState::FRESH
                } else {
                    space.sweep.holes.store(true, Ordering::Relaxed);
                    PageState::Hole
                };
                entry.replace(state, known);
            }
            true
        });
    }
}

struct Planner<'a> {
    space: &'a AddressSpace,
    gate: &'a Shared<'a>,
    thread_ends: Arc<[VirtualPage]>,
    wanted: usize,
    kept: usize,
    now: u32,
    looked: usize,
    /// Resident pages that the hand met.
    met: u64,
    /// The hand skipped a page that it takes on a later way round.
    passed: bool,
    /// The hand went all the way round and met no page that it may take, now or on a later way.
    exhausted: bool,
    runs: Vec<Run>,
    pages: usize,
    /// Runs of `Removed` pages that the kernel has dropped by now.
    removed: Vec<PageRange>,
    /// The list that victims are taken from.
    list: List,
    /// How many of the next ones are samples of it.
    samples: usize,
    /// Where pages that were accessed are spared.
    sparing: Option<Sparing>,
}

impl Planner<'_> {
    /// Takes victims whose COW was broken, or else from the clock hand on.
    fn choose(&mut self) {
        let space = self.space;
        let wanted = self.wanted;
        let managed = lock(&space.managed).clone();
        let ranges = space.unevictable.evictable(managed.ranges());
        for list in [&space.clock.cow_broken, &space.clock.sibling_ranges] {
            let due = std::mem::take(&mut *lock(list));
            // Ranges that are not managed any more must not be moved, and unevictable ones cannot.
            let parts = due.iter().flat_map(|range| {
                let inside = ranges.iter().map(|region| region.intersection(*range));
                inside.filter(|part| !part.is_empty())
            });
            for part in parts {
                let stopped = if self.pages == wanted {
                    Some(part.start)
                } else {
                    self.take(part)
                };
                if let Some(start) = stopped {
                    lock(list).push(PageRange { start, ..part });
                    space.resources.note_listed();
                }
            }
            if self.pages > 0 {
                // Do not add ordinary victims to this batch: breaking their COW would produce new
                // copies and keep this address space first in line forever.
                return;
            }
        }
        space
            .clock
            .recent
            .store(managed.pages() / RECENT_DIVISOR, Ordering::Relaxed);
        if !self.keep(&ranges) {
            self.exhausted = true;
            return;
        }
        space.track_arrived();
        self.sparing = space.spares_accessed().then(Sparing::default);
        self.take_inactive(&ranges);
        if self.pages < self.wanted {
            self.take_active(&ranges);
        }
    }

    /// Takes the share of victims that come from the inactive list.
    fn take_inactive(&mut self, ranges: &[PageRange]) {
        #[cfg(simulated)]
        if crate::simulation::adversity::is_by_hand() {
            return;
        }
        let space = self.space;
        let wanted = self.wanted;
        let (own, all) = (space.resident_pages(), space.resources.charged_pages());
        let quota = {
            let (own, all) = (own.max(0) as u64, all);
            lock(&space.clock.replacement).quota(wanted, own, all)
        };
        (self.list, self.samples, self.wanted) = (List::Inactive, quota.samples, quota.inactive);
        'lists: while self.pages < self.wanted && self.spared() < MOST_SPARED {
            let Some(range) = lock(&space.clock.replacement).take_inactive() else {
                break;
            };
            for region in ranges {
                let part = region.intersection(range);
                if !part.is_empty()
                    && let Some(start) = self.take(part)
                {
                    let left = PageRange { start, ..range };
                    lock(&space.clock.replacement).give_back(left);
                    break 'lists;
                }
            }
        }
        let is_fifo = {
            let mut replacement = lock(&space.clock.replacement);
            replacement.activate_oldest();
            replacement.is_fifo()
        };
        (self.list, self.samples, self.wanted) = (List::Active, quota.samples, wanted);
        if !is_fifo {
            self.take_samples(ranges);
        }
    }

    /// Takes the samples of active pages from a random page on.
    fn take_samples(&mut self, ranges: &[PageRange]) {
        let pages: u64 = ranges.iter().map(|range| range.pages()).sum();
        if pages == 0 || self.samples == 0 {
            return;
        }
        let mut left = lock(&self.space.clock.replacement).random_below(pages);
        let (wanted, met) = (self.wanted, self.met);
        self.wanted = wanted.min(self.pages + self.samples);
        for range in ranges {
            if left >= range.pages() {
                left -= range.pages();
                continue;
            }
            let start = range.start.plus(left);
            left = 0;
            if self.take(PageRange { start, ..*range }).is_some() {
                break;
            }
        }
        (self.wanted, self.met, self.samples) = (wanted, met, 0);
    }

    /// Takes victims from the clock hand on.
    fn take_active(&mut self, ranges: &[PageRange]) {
        let space = self.space;
        self.met = 0;
        let hand = VirtualPage(space.clock.hand.load(Ordering::Relaxed));
        let behind = ranges.iter().map(|range| PageRange {
            start: range.start.max(hand),
            end: range.end,
        });
        let before = ranges.iter().map(|range| PageRange {
            start: range.start,
            end: range.end.min(hand),
        });
        let clock = &space.clock;
        let mut behind = behind.filter(|range| !range.is_empty());
        let mut stopped = behind.find_map(|range| self.take(range));
        clock.met.fetch_add(self.met, Ordering::Relaxed);
        if stopped.is_none() {
            let met = clock.met.swap(0, Ordering::Relaxed);
            clock.evictable.store(met, Ordering::Relaxed);
            self.met = 0;
            let mut before = before.filter(|range| !range.is_empty());
            stopped = before.find_map(|range| self.take(range));
            clock.met.fetch_add(self.met, Ordering::Relaxed);
        }
        self.exhausted = stopped.is_none() && self.pages == 0 && !self.passed;
        let stopped = stopped.unwrap_or(hand);
        clock.hand.store(stopped.0, Ordering::Relaxed);
    }

    /// Lowers `wanted` so that `kept` evictable pages are left. Counts them only if the hand met few on
    /// its last way round. Returns whether any may be taken.
    fn keep(&mut self, ranges: &[PageRange]) -> bool {
        let enough = (self.kept + self.wanted) as u64;
        if self.kept == 0 || self.space.clock.evictable.load(Ordering::Relaxed) >= 2 * enough {
            return true;
        }
        let pages = evictable_pages(self.gate, ranges, enough) as usize;
        self.wanted = self.wanted.min(pages.saturating_sub(self.kept));
        self.wanted > 0
    }

    /// Takes victims from a range. Returns the page at which the hand stopped, if it did before the
    /// end.
    fn take(&mut self, range: PageRange) -> Option<VirtualPage> {
        let mut stopped = None;
        let gate = self.gate;
        gate.table().visit(range, |page, entry| {
            self.looked += 1;
            if self.looked > LOOKED_AT {
                stopped = Some(page);
                return false;
            }
            let state = entry.load();
            self.met += u64::from(matches!(state, PageState::Resident { .. }));
            let more = match (state, state.skipped()) {
                (PageState::Resident { .. }, _)
                    if self.thread_ends.binary_search(&page).is_ok() =>
                {
                    true
                }
                (PageState::Resident { .. }, _) if self.spares(page) => {
                    self.passed = true;
                    true
                }
                (_, Some(passed)) => {
                    entry.replace(state, passed);
                    self.passed = true;
                    true
                }
                (PageState::Resident { shared: true, .. }, None) => self.add_cow_break(page),
                (PageState::Resident { shared: false, .. }, None) => self.add_move(page, entry),
                (PageState::Removed(removal), None)
                    if self.space.removed.is_over(removal, self.now) =>
                {
                    self.add_removed(page);
                    true
                }
                _ => true,
            };
            if !more {
                stopped = Some(page);
            }
            more
        });
        stopped
    }

    /// Whether a page stays, as it was accessed.
    fn spares(&mut self, page: VirtualPage) -> bool {
        let sparing = self.sparing.as_mut();
        sparing.is_some_and(|sparing| sparing.spares(self.space, page))
    }

    /// Pages that were spared.
    fn spared(&self) -> u64 {
        self.sparing.as_ref().map_or(0, Sparing::pages)
    }

    fn end_sparing(&mut self) {
        if let Some(sparing) = &self.sparing {
            sparing.track_spared(self.space);
        }
        let spared_all = self.spared() > 0 && self.pages == 0;
        self.space
            .clock
            .spared_all
            .store(spared_all, Ordering::Relaxed);
    }

    fn add_removed(&mut self, page: VirtualPage) {
        let next = page.plus(1);
        let full = self.removed.len() == REMOVED_RUNS;
        match self.removed.last_mut() {
            Some(range) if range.end == page => range.end = next,
            _ if full => {}
            _ => self.removed.push(PageRange {
                start: page,
                end: next,
            }),
        }
    }

    /// Adds a page whose COW is to be broken. `false` if the batch is full.
    fn add_cow_break(&mut self, page: VirtualPage) -> bool {
        if self.pages == self.wanted {
            return false;
        }
        let full = self.runs.len() == RUNS_MAX;
        match self.runs.last_mut() {
            Some(run) if run.place.is_none() && behind(run) == page => run.pages += 1,
            _ if full => return false,
            _ => self.runs.push(Run {
                page,
                pages: 1,
                place: None,
            }),
        }
        self.pages += 1;
        true
    }

    /// Adds a page to be moved to the stage. `false` if the batch or the stage is full.
    fn add_move(&mut self, page: VirtualPage, entry: &Entry) -> bool {
        if self.pages == self.wanted {
            return false;
        }
        let sample = (self.samples > 0).then_some(self.list);
        let Some(place) = lock(&self.space.stage).reserve(sample) else {
            return false;
        };
        let extends = self.runs.last().is_some_and(|run| {
            behind(run) == page
                && run
                    .place
                    .is_some_and(|first| first.0 + run.pages == place.0)
        });
        let room = extends || self.runs.len() < RUNS_MAX;
        let state = entry.load();
        let movable = matches!(state, PageState::Resident { .. });
        if !room || !movable || !entry.replace(state, PageState::Moving(place)) {
            lock(&self.space.stage).unused(place);
            return room;
        }
        self.pages += 1;
        self.samples = self.samples.saturating_sub(1);
        match self.runs.last_mut() {
            Some(run) if extends => run.pages += 1,
            _ => self.runs.push(Run {
                page,
                pages: 1,
                place: Some(place),
            }),
        }
        true
    }
}

/// The page after a run.
fn behind(run: &Run) -> VirtualPage {
    run.page.plus(u64::from(run.pages))
}
