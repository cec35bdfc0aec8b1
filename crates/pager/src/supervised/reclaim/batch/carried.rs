//! Batches whose pages the helper carries off by `mremap`, as the kernel has no `UFFDIO_MOVE`.
//!
//! The helper carries off one run after the other, and waits in the gate until the event of each `mremap` is read. A thread
//! that reads messages finds it there ([`AddressSpace::awaits_read`]) and relieves it: its pages are in the stage, and it
//! carries off no others before it has entered the gate again. Then the run is settled by what is in the stage, before any
//! message is read. The rest of the batch is in flight until the helper says that it is done; a run that is settled has no
//! pages left in it.
//!
//! Other threads may have changed the mappings just before, which the event does not tell. If they unmapped the pages, or
//! moved them away, none is in the stage. If they moved others there, those are (`resolve_overrun`).

use crate::bugs::Bug;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, StageIndex};
use crate::supervised::reclaim::batch::{Batch, Carried, HelperPort, Overrun, Run};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::channel::{DropRun, MoveRun};
use memfold_sys::port::Outcome;
use std::sync::atomic::Ordering;

impl Carried {
    fn places(self, space: &AddressSpace) -> PageRange {
        self.from
            .moved(self.from.start, space.stage_page(self.place))
    }
}

impl HelperPort {
    /// The run of the batch in flight that the helper carries off, or was the last to, if it is not settled.
    /// `removals` `madvise` events were read.
    fn carried_run(&self, removals: u32) -> Option<Carried> {
        let index = self.port.shared().carrying()?;
        let run = self.batch.as_ref()?.moves.get(index)?;
        let place = run.place.filter(|_| run.pages > 0)?;
        Some(Carried {
            from: run.range(),
            place,
            index,
            removals,
        })
    }
}

impl AddressSpace {
    /// Whether the helper, which is in the gate, has carried its run off and waits for the event to be read.
    pub(crate) fn awaits_read(&self) -> bool {
        let carried = lock(&self.helper_port).carried_run(0);
        let Some(carried) = carried else { return false };
        let is_there = |range: PageRange| self.present(range).is_ok_and(|found| found.pages() > 0);
        // The kernel fills the stage where the program locks all of its memory. The helper's `mremap` raises what
        // `is_changing` reads before the pages move, until its event is read.
        let is_in_stage = || self.is_changing() && is_there(carried.places(self));
        // The first page was there when the batch was planned. (If all of them were dropped meanwhile, none is in the
        // stage.)
        is_in_stage() || !is_there(PageRange::around(carried.from.start, 1))
    }

    /// Settles a run that was carried off, by what is in the stage, before any message is read: a forking thread goes on,
    /// and may end, once its event is read. Returns a run of which the event is yet to be read: not all changes are known
    /// before. `unapplied` counts the `madvise` events that were read and not applied.
    pub(crate) fn settle_before_read(
        &self,
        gate: &Exclusive<'_>,
        unapplied: impl Fn() -> u32,
    ) -> Option<Carried> {
        if !self.resources.carries() || Bug::CarriedSettledLate.is_back() {
            return None;
        }
        let removals = self.removals_read(unapplied());
        let (carried, unread) = {
            let port = lock(&self.helper_port);
            (port.carried_run(removals), port.unread)
        };
        let Some(carried) = carried else {
            return unread;
        };
        let in_stage = self.present(carried.places(self));
        if !in_stage.is_ok_and(|found| found.pages() > 0) {
            return unread;
        }
        // Else the kernel may have filled the stage: see `awaits_read`.
        let is_sure = self.is_changing();
        self.settle_run(gate, carried, is_sure);
        lock(&self.helper_port).unread = Some(carried);
        Some(carried)
    }

    /// Whether the event of an `mremap` is the helper's own. A run of which nothing was in the stage is settled now.
    pub(crate) fn take_carried(
        &self,
        gate: &Exclusive<'_>,
        (from, to): (PageRange, VirtualPage),
        unapplied: impl Fn() -> u32,
    ) -> Option<Carried> {
        let place = self.place_at(to).filter(|_| self.resources.carries())?;
        let removals = self.removals_read(unapplied());
        // Else it is the program's own.
        let is_its = |carried: &mut Carried| {
            carried.place == place
                && carried.from.start == from.start
                && carried.from.end >= from.end
        };
        let (unread, mut unsettled) = {
            let mut port = lock(&self.helper_port);
            let unread = port.unread.take_if(is_its);
            port.is_unresolved |= unread.is_some();
            (unread, port.carried_run(removals))
        };
        let carried = match unread {
            Some(carried) => carried,
            None => {
                let carried = unsettled.take_if(is_its)?;
                self.settle_run(gate, carried, true);
                carried
            }
        };
        // The helper looks whether its event came.
        self.channel.note_carried();
        Some(carried)
    }

    /// Settles the run that was carried off, and the drops, which the helper did before. What it has to tell of them has
    /// no effect any more. `is_sure`: what is in the stage was carried there.
    fn settle_run(&self, gate: &Exclusive<'_>, carried: Carried, is_sure: bool) {
        let drops = {
            let mut port = lock(&self.helper_port);
            let Some(batch) = &mut port.batch else { return };
            batch.moves[carried.index].pages = 0;
            let drops = std::mem::take(&mut batch.drops);
            port.is_unresolved = true;
            drops
        };
        self.note_posted();
        // If it cannot be seen, the program is exiting.
        let in_stage = if drops.is_empty() {
            self.present(carried.places(self))
        } else {
            self.in_stage()
        };
        let in_stage = in_stage.unwrap_or_default();
        let is_staged = |place| in_stage.containing(self.stage_page(place)).is_some();
        let (mut batch, mut is_unknown) = (Batch::default(), false);
        let mut outcome = Outcome {
            stale: false,
            drops: drops_of(&drops, is_staged),
            moves: Vec::new(),
        };
        batch.drops = drops;
        for step in 0..carried.from.pages() as u32 {
            let page = carried.from.start.plus(u64::from(step));
            let place = StageIndex(carried.place.0 + step);
            // What is not in the stage is in the next mapping, or has gone elsewhere, of which the event is unread: its state
            // goes along. If nothing was there, a fault finds that out.
            let (is_carried, entry) = (is_staged(place), gate.table().entry(page));
            let (moved, errno) = if is_carried {
                (1, 0)
            } else {
                (0, Errno::EAGAIN.0)
            };
            is_unknown |= is_carried && entry.load() == PageState::Hole;
            // What was planned was unmapped: the reader that applied this relieved the helper before it carried anything off.
            // What was mapped there since is managed by now, and may move away, of which the event is unread.
            let is_new = is_sure
                && is_carried
                && matches!(entry.load(), PageState::Resident { .. })
                && !self.is_present(page);
            if is_new && !Bug::CarriedManaged.is_back() {
                entry.set(PageState::Moving(place));
            }
            batch.moves.push(Run {
                page,
                pages: 1,
                place: Some(place),
            });
            outcome.moves.push(MoveRun {
                moved,
                errno,
                ..MoveRun::default()
            });
        }
        // The batch was planned when there was memory. That was unmapped, as was known before the run was carried off, and
        // what was mapped there since is registered, but not managed as yet.
        if is_sure && is_unknown && !Bug::CarriedUnmanaged.is_back() {
            self.kill_program(
                "memory that one of its threads had just mapped where another was being paged out is lost",
            );
        }
        let settled = batch.settle_with(self, gate, &outcome);
        let mut port = lock(&self.helper_port);
        port.carried.staged += settled.staged;
        port.carried.dropped += settled.dropped;
    }

    /// Notes changes by which it may be unknown what is carried off, if anything may be. What was noted before a batch is
    /// posted says nothing of its runs.
    pub(crate) fn note_overrun(&self, changes: &Overrun) {
        if !self.resources.carries() {
            return;
        }
        let mut port = lock(&self.helper_port);
        if port.batch.is_some() || port.unread.is_some() || port.is_unresolved {
            let noted = &mut port.overrun;
            noted.removed_moved.add_all(&changes.removed_moved);
            noted.unmanaged_moved.add_all(&changes.unmanaged_moved);
            noted.unmapped.add_all(&changes.unmapped);
        }
    }

    /// Looks which pages were carried off, once the changes of other threads are applied: they count as later than the
    /// helper's, of which its event tells nothing. What had moved away before is in memory where it moved to (and what
    /// is still where it was, if `mlockall` has filled the stage). What had moved to where the run was is in the stage.
    /// Returns whether page states were wrong; `None` if that cannot be seen, as the program is exiting.
    pub(crate) fn resolve_overrun(&self, gate: &Exclusive<'_>, carried: Carried) -> Option<bool> {
        let overrun = {
            let mut port = lock(&self.helper_port);
            port.is_unresolved = false;
            std::mem::take(&mut port.overrun)
        };
        if Bug::CarriedOverrun.is_back() {
            return Some(false);
        }
        let (Ok(still), Ok(in_stage)) = (
            self.present(carried.from),
            self.present(carried.places(self)),
        ) else {
            return None;
        };
        let (mut is_unknown, mut is_untold, mut were_wrong) = (false, false, false);
        let mut stage = lock(&self.stage);
        for step in 0..carried.from.pages() as u32 {
            let page = carried.from.start.plus(u64::from(step));
            let place = StageIndex(carried.place.0 + step);
            let stage_page = self.stage_page(place);
            if in_stage.containing(stage_page).is_none() {
                continue;
            }
            let mut is_others = overrun.unmapped.containing(stage_page).is_some();
            if let Some(owner) = stage.owner(place)
                && self.is_present(owner)
                && (gate.table().entry(owner)).replace(PageState::Staged(place), PageState::FRESH)
            {
                stage.retire(place);
                (is_others, were_wrong) = (true, true);
            }
            let entry = gate.table().entry(page);
            if matches!(entry.load(), PageState::Resident { .. })
                && still.containing(page).is_none()
                && stage.revive(place, page)
            {
                entry.set(PageState::Staged(place));
                were_wrong = true;
            }
            is_unknown |= is_others
                && matches!(entry.load(), PageState::Removed(removal) if removal.is_before(carried.removals))
                && overrun.removed_moved.containing(page).is_some()
                && still.containing(page).is_none();
            // In the stage is what was planned, or what was moved there since, which has no states.
            is_untold |= stage.owner(place).is_none()
                && entry.load() == PageState::Hole
                && overrun.unmanaged_moved.containing(page).is_some()
                && still.containing(page).is_none();
        }
        drop(stage);
        if is_untold && !Bug::CarriedUntold.is_back() {
            self.kill_program(
                "memory that was not managed yet was moved by one of its threads to where memory was being paged out, and \
                 may be lost",
            );
        }
        if is_unknown && !Bug::CarriedFreed.is_back() {
            self.kill_program(
                "memory that one of its threads had freed with madvise was moved to where memory was being paged out, and \
                 may be lost",
            );
        }
        Some(were_wrong || is_unknown || is_untold)
    }

    /// Number of `madvise` events that were read, of which so many are unapplied.
    fn removals_read(&self, unapplied: u32) -> u32 {
        let applied = self.removed.count.load(Ordering::Relaxed);
        applied.wrapping_add(unapplied)
    }

    fn is_present(&self, page: VirtualPage) -> bool {
        self.present(PageRange::around(page, 1))
            .is_ok_and(|found| found.pages() > 0)
    }
}

/// What became of places to free, which the helper did before it carried anything off.
pub(crate) fn drops_of(
    drops: &[(StageIndex, u32)],
    is_staged: impl Fn(StageIndex) -> bool,
) -> Vec<DropRun> {
    let is_left = |(first, pages): &(StageIndex, u32)| {
        (0..*pages).any(|step| is_staged(StageIndex(first.0 + step)))
    };
    let errno = |left| if left { Errno::EAGAIN.0 } else { 0 };
    let results = drops.iter().map(|run| DropRun {
        errno: errno(is_left(run)),
        ..DropRun::default()
    });
    results.collect()
}
