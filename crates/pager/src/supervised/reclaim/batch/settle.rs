//! Settling a batch: applying its outcome to the page states.

use crate::bugs::Bug;
use crate::page::PageRange;
use crate::page_state::{PageState, StageIndex};
use crate::range_set::RangeSet;
use crate::supervised::reclaim::batch::{Batch, Run, Settled};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::Inside;
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::channel::MoveRun;
use memfold_sys::port::Outcome;
use std::sync::atomic::Ordering;

/// Maximum length of `sibling_ranges`, which are hints. More frees more shared pages and takes more
/// memory.
const SIBLING_RANGES_MAX: usize = 256;

impl Batch {
    /// Settles the batch in flight, if the helper is done with it.
    pub(crate) fn settle(space: &AddressSpace, gate: &impl Inside) -> Option<Settled> {
        debug_assert!(gate.is_of(space));
        let mut port = lock(&space.helper_port);
        if port.taken_over && port.port.outcome(0, 0).is_some() {
            // The helper continued and is done with its command.
            port.taken_over = false;
        }
        if port.stage_closed && !port.taken_over {
            space.reopen_stage(&mut port);
        }
        let batch = port.batch.as_ref()?;
        let (drops, moves) = (batch.drops.len(), batch.moves.len());
        let mut outcome = port.port.outcome(drops, moves)?;
        let batch = port.batch.take()?;
        batch.count_unreported(space, &mut outcome);
        Some(batch.settle_with(space, gate, &outcome))
    }

    /// Applies an outcome of this batch.
    pub(crate) fn settle_with(
        &self,
        space: &AddressSpace,
        gate: &impl Inside,
        outcome: &Outcome,
    ) -> Settled {
        debug_assert!(gate.is_of(space));
        let mut settled = Settled::default();
        self.apply_drops(space, outcome, &mut settled);
        for (index, run) in self.moves.iter().enumerate() {
            let result = outcome.moves.get(index);
            match run.place {
                Some(place) => {
                    let result = result.filter(|_| !outcome.stale);
                    apply_move((space, gate), run, place, result, &mut settled);
                }
                None => settled.cow_broken += apply_cow_break(space, gate, run, result),
            }
        }
        space.add_resident_pages(-(settled.dropped as i64));
        settled
    }

    /// Adds the pages that were moved without being reported to the helper.
    fn count_unreported(&self, space: &AddressSpace, outcome: &mut Outcome) {
        if outcome.stale || Bug::MovesForgotten.is_back() {
            return;
        }
        let mut in_stage = None;
        let mut is_staged = |place| {
            let in_stage = in_stage.get_or_insert_with(|| {
                space.in_stage().unwrap_or_else(|error| {
                    log::debug!(
                        "cannot check which pages were moved, trusting the helper: {error}"
                    );
                    RangeSet::default()
                })
            });
            in_stage.containing(space.stage_page(place)).is_some()
        };
        for (run, result) in self.moves.iter().zip(&mut outcome.moves) {
            run.count_unreported(result, &mut is_staged);
        }
    }

    fn apply_drops(&self, space: &AddressSpace, outcome: &Outcome, settled: &mut Settled) {
        let mut stage = lock(&space.stage);
        for ((place, pages), result) in self.drops.iter().zip(&outcome.drops) {
            if result.errno == 0 || Bug::DropsTakenForDone.is_back() {
                stage.dropped(*place, *pages);
                settled.dropped += *pages as usize;
            } else {
                // Some pages of the run may be freed; the next try skips them.
                stage.not_dropped(*place, *pages);
            }
        }
    }
}

/// Applies the result of breaking COW. Returns the number of pages that are not shared any more.
fn apply_cow_break(
    space: &AddressSpace,
    gate: &impl Inside,
    run: &Run,
    result: Option<&MoveRun>,
) -> usize {
    let done = result.is_some_and(|result| result.errno == 0);
    if result.is_some_and(|result| Errno(result.errno) == Errno::EINVAL) {
        space.unevictable.note_cow_break();
    }
    let range = PageRange {
        start: run.page,
        end: run.page.plus(u64::from(run.pages)),
    };
    if done {
        // The copies were made for page-out: they are the next victims.
        lock(&space.clock.cow_broken).push(range);
        note_cow_broken(space, range);
        space.resources.note_listed();
    }
    for step in 0..run.pages {
        let entry = gate.table().entry(run.page.plus(u64::from(step)));
        if let state @ PageState::Resident {
            skips,
            shared: true,
        } = entry.load()
        {
            // After a failure, the hand skips the page once before the next try.
            let next = PageState::Resident {
                skips: if done { skips } else { skips.max(1) },
                shared: !done,
            };
            entry.replace(state, next);
        }
    }
    if done { run.pages as usize } else { 0 }
}

/// Adds a range to the `sibling_ranges` of relatives, as only paging out their copies, too, frees
/// memory, and lowers the estimate of shared pages.
fn note_cow_broken(space: &AddressSpace, range: PageRange) {
    let mut copied = vec![false; range.pages() as usize];
    for relative in space.fork.family.others(space) {
        let mut any = false;
        // A second gate is entered here, without waiting for it.
        if let Some(gate) = relative.try_shared() {
            gate.table().visit(range, |page, entry| {
                if matches!(entry.load(), PageState::Resident { shared: true, .. }) {
                    copied[(page.0 - range.start.0) as usize] = true;
                    any = true;
                }
                true
            });
        } else {
            // Assume that all pages were shared. The estimate is too low until the next count.
            copied.fill(true);
            any = true;
        }
        let mut siblings = lock(&relative.clock.sibling_ranges);
        if any && siblings.len() < SIBLING_RANGES_MAX && !siblings.contains(&range) {
            siblings.push(range);
        }
    }
    // A page that no relative shares was not copied, but its write was a minor fault, too.
    let copies = copied.iter().filter(|copied| **copied).count() as u64;
    space
        .sampling
        .counted_faults
        .fetch_add(range.pages(), Ordering::Relaxed);
    space.resources.shared.lower(copies);
}

/// Applies the result of moving a run to the stage.
fn apply_move(
    (space, gate): (&AddressSpace, &impl Inside),
    run: &Run,
    first: StageIndex,
    result: Option<&MoveRun>,
    settled: &mut Settled,
) {
    let moved = result.map_or(0, |result| result.moved.min(run.pages));
    let errno = result.map_or(Errno::EAGAIN, |result| Errno(result.errno));
    let forked = || space.fork.forked.load(Ordering::Relaxed);
    let shares = errno == Errno::EBUSY && forked() && space.fork.family.has_others(space);
    let mut stage = lock(&space.stage);
    for step in 0..run.pages {
        let page = run.page.plus(u64::from(step));
        let place = StageIndex(first.0 + step);
        let entry = gate.table().entry(page);
        let moving = PageState::Moving(place);
        if step < moved {
            settled.staged += 1;
            if entry.replace(moving, PageState::Staged(place)) {
                stage.arrived(place, page);
            } else {
                // The page was unmapped meanwhile, so the staged copy is not needed.
                stage.arrived_dead(place);
            }
            continue;
        }
        if step == moved && errno == Errno::EINVAL {
            space.unevictable.note_move(page);
        }
        if errno == Errno::ENOSPC {
            // Something else may be mapped at the places by now (`carried.rs`): they are not used again.
        } else if step == moved && errno == Errno::EEXIST {
            // The place is occupied: the program touched it (`mlockall`).
            stage.arrived_dead(place);
        } else {
            stage.unused(place);
        }
        let stays = state_of_unmoved(errno, step == moved, shares);
        entry.replace(moving, stays);
    }
}

/// The state of a page that was not moved, as the run ended with an error at this page or at one before it.
fn state_of_unmoved(errno: Errno, is_first: bool, shares: bool) -> PageState {
    match (is_first, errno) {
        // The program dropped the page, and the event is not read yet.
        (true, Errno::ENOENT) => PageState::Hole,
        // The page is shared by a fork, or pinned. A fork shares whole ranges, so the neighbours mostly are shared,
        // too; those of a pinned page are not pinned.
        (_, Errno::EBUSY) if is_first || shares => PageState::Resident {
            skips: 0,
            shared: true,
        },
        // The page cannot be moved now; the hand skips it once before the next try.
        (true, _) => PageState::FRESH,
        (false, _) => PageState::RESIDENT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_behind_a_pinned_one_are_tried_without_it() {
        let shared = PageState::Resident {
            skips: 0,
            shared: true,
        };
        let state = |is_first, shares| state_of_unmoved(Errno::EBUSY, is_first, shares);
        assert_eq!(
            (state(true, false), state(false, false)),
            (shared, PageState::RESIDENT)
        );
        assert_eq!((state(true, true), state(false, true)), (shared, shared));
    }
}
