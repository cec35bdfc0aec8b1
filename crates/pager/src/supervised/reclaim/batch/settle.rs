//! Applying what the helper did of a batch.

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

/// Ranges that a relative is asked to move out, too, at most: it is a hint.
const TO_FOLLOW_MOST: usize = 256;

impl Batch {
    /// Applies the outcome of the batch that is with the helper, if the helper is done with it.
    pub fn settle(space: &AddressSpace, gate: &impl Inside) -> Option<Settled> {
        let mut port = lock(&space.helper_port);
        if port.taken_over && port.port.outcome(0, 0).is_some() {
            // It has gone on, and done its command.
            port.taken_over = false;
        }
        if port.stage_closed && !port.taken_over {
            space.reopen_stage(&mut port);
        }
        let batch = port.batch.as_ref()?;
        let (drops, moves) = (batch.drops.len(), batch.moves.len());
        let mut outcome = port.port.outcome(drops, moves)?;
        let batch = port.batch.take()?;
        batch.count_forgotten(space, &mut outcome);
        Some(batch.settle_with(space, gate, &outcome))
    }

    /// Applies an outcome of this batch.
    pub fn settle_with(
        &self,
        space: &AddressSpace,
        gate: &impl Inside,
        outcome: &Outcome,
    ) -> Settled {
        let mut settled = Settled::default();
        self.settle_drops(space, outcome, &mut settled);
        for (index, run) in self.moves.iter().enumerate() {
            let result = outcome.moves.get(index);
            match run.place {
                Some(place) => {
                    let result = result.filter(|_| !outcome.stale);
                    settle_move((space, gate), run, place, result, &mut settled);
                }
                None => settled.cow_broken += settle_cow_break(space, gate, run, result),
            }
        }
        space.add_resident_pages(-(settled.dropped as i64));
        settled
    }

    /// Adds the pages that the helper moved and was not told of, where it could not look.
    fn count_forgotten(&self, space: &AddressSpace, outcome: &mut Outcome) {
        if outcome.stale {
            return;
        }
        let mut in_stage = None;
        let mut is_staged = |place| {
            let in_stage = in_stage.get_or_insert_with(|| {
                space.in_stage().unwrap_or_else(|error| {
                    log::debug!("what was moved is as the helper says, unseen: {error}");
                    RangeSet::default()
                })
            });
            in_stage.containing(space.stage_page(place)).is_some()
        };
        for (run, result) in self.moves.iter().zip(&mut outcome.moves) {
            run.count_forgotten(result, &mut is_staged);
        }
    }

    fn settle_drops(&self, space: &AddressSpace, outcome: &Outcome, settled: &mut Settled) {
        let mut stage = lock(&space.stage);
        for ((place, pages), result) in self.drops.iter().zip(&outcome.drops) {
            if result.errno == 0 {
                stage.dropped(*place, *pages);
                settled.dropped += *pages as usize;
            } else {
                // Pages of the run that are gone already do not stop the next try.
                stage.not_dropped(*place, *pages);
            }
        }
    }
}

/// Returns how many pages are not shared any more.
fn settle_cow_break(
    space: &AddressSpace,
    gate: &impl Inside,
    run: &Run,
    result: Option<&MoveRun>,
) -> usize {
    let done = result.is_some_and(|result| result.errno == 0);
    let range = PageRange {
        start: run.page,
        end: run.page.plus(u64::from(run.pages)),
    };
    if done {
        // They were copied for this: they go out with the next command.
        lock(&space.clock.cow_broken).push(range);
        note_cow_broken(space, range);
    }
    for step in 0..run.pages {
        let entry = gate.table().entry(run.page.plus(u64::from(step)));
        if let state @ PageState::Resident {
            skips,
            shared: true,
        } = entry.load()
        {
            // Where it failed, the hand looks again when it comes round twice.
            let next = PageState::Resident {
                skips: if done { skips } else { skips.max(1) },
                shared: !done,
            };
            entry.replace(state, next);
        }
    }
    if done { run.pages as usize } else { 0 }
}

/// Lets the others' pages of a range go out, too: until they have, nothing is gained.
fn note_cow_broken(space: &AddressSpace, range: PageRange) {
    let mut copied = vec![false; range.pages() as usize];
    for relative in space.fork.family.others(space) {
        let mut any = false;
        // Two gates are held for a moment, the second without waiting for it.
        if let Some(gate) = relative.try_shared() {
            gate.table().visit(range, |page, entry| {
                if matches!(entry.load(), PageState::Resident { shared: true, .. }) {
                    copied[(page.0 - range.start.0) as usize] = true;
                    any = true;
                }
                true
            });
        } else {
            // Taken for copied: more counts as resident, until the kernel is asked again.
            copied.fill(true);
            any = true;
        }
        let mut follow = lock(&relative.clock.sibling_ranges);
        if any && follow.len() < TO_FOLLOW_MOST && !follow.contains(&range) {
            follow.push(range);
        }
    }
    // What nobody else has was not copied, and a fault of the kernel's all the same.
    let copies = copied.iter().filter(|copied| **copied).count() as u64;
    space
        .sampling
        .counted_faults
        .fetch_add(range.pages(), Ordering::Relaxed);
    space.resources.shared.lower(copies);
}

fn settle_move(
    (space, gate): (&AddressSpace, &impl Inside),
    run: &Run,
    first: StageIndex,
    result: Option<&MoveRun>,
    settled: &mut Settled,
) {
    let moved = result.map_or(0, |result| result.moved.min(run.pages));
    let errno = result.map_or(Errno::EAGAIN, |result| Errno(result.errno));
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
                // Unmapped since: what was moved is of no more use.
                stage.arrived_dead(place);
            }
            continue;
        }
        if step == moved && errno == Errno::EEXIST {
            // Only the program can have put something there.
            stage.arrived_dead(place);
        } else {
            stage.unused(place);
        }
        let stays = match (step == moved, errno) {
            // Not there: dropped by the program before its event was seen.
            (true, Errno::ENOENT) => PageState::Hole,
            (true, Errno::EBUSY) => PageState::Resident {
                skips: 0,
                shared: true,
            },
            // Cannot be moved now: look again when the hand comes round twice.
            (true, _) => PageState::FRESH,
            // So will its neighbours be, as a rule: a fork shares whole ranges.
            (false, Errno::EBUSY) => PageState::Resident {
                skips: 0,
                shared: true,
            },
            (false, _) => PageState::RESIDENT,
        };
        entry.replace(moving, stays);
    }
}
