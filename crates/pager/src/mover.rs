//! Batches of pages on their way to the stage, and staged pages on their way out.
//!
//! One command is with the helper at a time. Its outcome is applied ("settled") by whoever needs
//! it first: the reclaimer, a fault on a page of the batch, or an event over it.

use crate::address_space::{AddressSpace, Shared};
use crate::group::lock;
use crate::page::{PageRange, VirtualPage};
use crate::regions::Regions;
use crate::stage::StageIndex;
use crate::state::PageState;
use memfold_sys::channel::{DropRun, MoveRun, RUNS_MAX};
use memfold_sys::port::{Outcome, Port, SharedChannel};
use memfold_sys::{Errno, PAGE_SIZE};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ranges that a relative is asked to move out, too, at most: it is a hint.
const TO_FOLLOW_MOST: usize = 256;

/// A run of pages of a command.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub page: VirtualPage,
    pub pages: u32,
    /// The first of the neighbouring places of the stage to move to, the pages being `Moving`;
    /// `None` to break the sharing that a fork left, the pages staying `Resident`.
    pub place: Option<StageIndex>,
}

/// What was posted and is not settled yet.
#[derive(Debug, Default)]
pub struct Batch {
    pub moves: Vec<Run>,
    pub drops: Vec<(StageIndex, u32)>,
}

/// The way to the helper.
pub struct Mover {
    pub port: Port,
    /// The channel's descriptor, until it is handed to the program.
    file: Option<OwnedFd>,
    pub batch: Option<Batch>,
    /// The helper was stopped in the gate and relieved: what it still does comes to nothing, and it
    /// takes no other command until it has done it.
    pub relieved: bool,
    /// The stage is not registered, so that nothing can be moved there.
    pub closed: bool,
}

/// What settling found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settled {
    pub staged: usize,
    pub dropped: usize,
    /// Pages taken out of sharing; they stay where they are.
    pub unshared: usize,
}

impl Mover {
    pub fn new(port: Port, file: OwnedFd) -> Mover {
        Mover {
            port,
            file: Some(file),
            batch: None,
            relieved: false,
            closed: false,
        }
    }

    /// The descriptor to hand to the program; once.
    pub fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    pub fn channel(&self) -> &Arc<SharedChannel> {
        self.port.shared()
    }

    /// Whether a command is with the helper or not settled.
    pub fn is_busy(&self) -> bool {
        self.batch.is_some() || self.relieved || self.closed
    }

    /// The number to wait for.
    pub fn posted(&self) -> u32 {
        self.port.posted()
    }
}

impl AddressSpace {
    /// Where a place of the stage lies in the program.
    pub fn stage_page(&self, place: StageIndex) -> VirtualPage {
        self.stage().start.plus(u64::from(place.0))
    }

    /// The same as an address.
    pub fn stage_address(&self, place: StageIndex) -> u64 {
        self.stage_page(place).address()
    }

    fn stage(&self) -> PageRange {
        let attached = self.attached();
        let attached = attached.expect("only attached spaces stage pages");
        attached.arena.stage
    }

    /// The pages of the stage that are in memory.
    pub fn in_stage(&self) -> io::Result<Regions> {
        self.present(self.stage())
    }

    /// The place of the stage that lies at a page, if one does.
    pub fn place_at(&self, page: VirtualPage) -> Option<StageIndex> {
        let stage = self.attached()?.arena.stage;
        let is_staged = stage.start <= page && page < stage.end;
        is_staged.then(|| StageIndex((page.0 - stage.start.0) as u32))
    }

    /// Posts one command. The batch before must be settled; `_held` shows that the gate is held,
    /// so that the event count belongs to the states the moves were planned from.
    pub fn post(&self, _held: &Shared<'_>, moves: Vec<Run>, drops: Vec<(StageIndex, u32)>) {
        assert!(
            moves.len() <= RUNS_MAX && drops.len() <= RUNS_MAX,
            "too many runs"
        );
        let mut mover = lock(&self.mover);
        assert!(mover.batch.is_none(), "the batch before is settled");
        let drop_runs: Vec<DropRun> = drops
            .iter()
            .map(|(place, pages)| DropRun {
                start: self.stage_address(*place),
                pages: *pages,
                errno: 0,
            })
            .collect();
        let move_runs: Vec<MoveRun> = moves
            .iter()
            .map(|run| MoveRun {
                source: run.page.address(),
                target: run.place.map_or(0, |place| self.stage_address(place)),
                pages: run.pages,
                unshare: u32::from(run.place.is_none()),
                ..MoveRun::default()
            })
            .collect();
        let count = self.channel.event_count();
        mover.port.post(count, &drop_runs, &move_runs);
        mover.batch = Some(Batch { moves, drops });
    }

    /// Applies the outcome of the last command if it is there. The gate must be held, shared or
    /// exclusively.
    pub fn settle(&self) -> Option<Settled> {
        let mut mover = lock(&self.mover);
        if mover.relieved && mover.port.outcome(0, 0).is_some() {
            // It has gone on, and done its command.
            mover.relieved = false;
        }
        if mover.closed && !mover.relieved {
            self.reopen_stage(&mut mover);
        }
        let batch = mover.batch.as_ref()?;
        let (drops, moves) = (batch.drops.len(), batch.moves.len());
        let outcome = mover.port.outcome(drops, moves)?;
        let batch = mover.batch.take()?;
        Some(self.settle_batch(&batch, &outcome))
    }

    pub fn settle_batch(&self, batch: &Batch, outcome: &Outcome) -> Settled {
        let mut settled = Settled::default();
        self.settle_drops(batch, outcome, &mut settled);
        let is_unsure = |result: &MoveRun| Errno(result.errno) == Errno::EAGAIN;
        let in_stage = match outcome.moves.iter().any(is_unsure) {
            // Where it cannot be seen, the program has ended: nobody will touch a page.
            true => self.in_stage().unwrap_or_default(),
            false => Regions::default(),
        };
        for (index, run) in batch.moves.iter().enumerate() {
            let result = outcome.moves.get(index);
            match run.place {
                Some(first) => {
                    let result = result.filter(|_| !outcome.stale).map(|result| MoveRun {
                        moved: self.count_moved(run, first, result, &in_stage),
                        ..*result
                    });
                    self.settle_move(run, first, result, &mut settled);
                }
                None => settled.unshared += self.settle_unshare(run, result),
            }
        }
        self.add_resident_pages(-(settled.dropped as i64));
        settled
    }

    /// How many pages of a run, from its front, were moved to their places.
    fn count_moved(
        &self,
        run: &Run,
        first: StageIndex,
        result: &MoveRun,
        in_stage: &Regions,
    ) -> u32 {
        let moved = result.moved.min(run.pages);
        if Errno(result.errno) != Errno::EAGAIN {
            return moved;
        }
        // It says that without a look at the pages, which an earlier try may have moved and forgotten:
        // see `Uffd::move_pages`.
        let has_arrived = |step: &u32| {
            let place = StageIndex(first.0 + step);
            in_stage.containing(self.stage_page(place)).is_some()
        };
        moved + (moved..run.pages).take_while(has_arrived).count() as u32
    }

    fn settle_drops(&self, batch: &Batch, outcome: &Outcome, settled: &mut Settled) {
        let mut stage = lock(&self.stage);
        for ((place, pages), result) in batch.drops.iter().zip(&outcome.drops) {
            if result.errno == 0 {
                stage.dropped(*place, *pages);
                settled.dropped += *pages as usize;
            } else {
                // Pages of the run that are gone already do not stop the next try.
                stage.not_dropped(*place, *pages);
            }
        }
    }

    /// Returns how many pages are not shared any more.
    fn settle_unshare(&self, run: &Run, result: Option<&MoveRun>) -> usize {
        let done = result.is_some_and(|result| result.errno == 0);
        let range = PageRange {
            start: run.page,
            end: run.page.plus(u64::from(run.pages)),
        };
        if done {
            // They were copied for this: they go out with the next command.
            lock(&self.unshared).push(range);
            self.note_unshared(range);
        }
        for step in 0..run.pages {
            let entry = self.table.entry(run.page.plus(u64::from(step)));
            if let state @ PageState::Resident {
                passes,
                shared: true,
            } = entry.load()
            {
                // Where it failed, the hand looks again when it comes round twice.
                let next = PageState::Resident {
                    passes: if done { passes } else { passes.max(1) },
                    shared: !done,
                };
                entry.replace(state, next);
            }
        }
        if done { run.pages as usize } else { 0 }
    }

    /// Lets the others' pages of a range go out, too: until they have, nothing is gained.
    fn note_unshared(&self, range: PageRange) {
        let mut copied = vec![false; range.pages() as usize];
        for relative in self.family.others(self) {
            let mut any = false;
            relative.table.visit(range, |page, entry| {
                if matches!(entry.load(), PageState::Resident { shared: true, .. }) {
                    copied[(page.0 - range.start.0) as usize] = true;
                    any = true;
                }
                true
            });
            let mut follow = lock(&relative.to_follow);
            if any && follow.len() < TO_FOLLOW_MOST && !follow.contains(&range) {
                follow.push(range);
            }
        }
        // What nobody else has was not copied, and a fault of the kernel's all the same.
        let copies = copied.iter().filter(|copied| **copied).count() as u64;
        self.counted_faults
            .fetch_add(range.pages(), Ordering::Relaxed);
        self.group().shared.lower_by(copies);
    }

    fn settle_move(
        &self,
        run: &Run,
        first: StageIndex,
        result: Option<MoveRun>,
        settled: &mut Settled,
    ) {
        let moved = result.map_or(0, |result| result.moved);
        let errno = result.map_or(Errno::EAGAIN, |result| Errno(result.errno));
        let mut stage = lock(&self.stage);
        for step in 0..run.pages {
            let page = run.page.plus(u64::from(step));
            let place = StageIndex(first.0 + step);
            let entry = self.table.entry(page);
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
                    passes: 0,
                    shared: true,
                },
                // Cannot be moved now: look again when the hand comes round twice.
                (true, _) => PageState::FRESH,
                // So will its neighbours be, as a rule: a fork shares whole ranges.
                (false, Errno::EBUSY) => PageState::Resident {
                    passes: 0,
                    shared: true,
                },
                (false, _) => PageState::RESIDENT,
            };
            entry.replace(moving, stays);
        }
    }
}

/// Pages in bytes.
pub fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE as u64
}
