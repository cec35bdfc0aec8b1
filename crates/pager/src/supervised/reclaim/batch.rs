//! Batches of pages on their way to the stage, and staged pages on their way out.
//!
//! One command is with the helper at a time. Its outcome is applied ("settled") by whoever needs
//! it first: the reclaimer, a fault on a page of the batch, or an event over it.

use crate::page::{PageRange, VirtualPage};
use crate::page_state::{PageState, StageIndex};
use crate::range_set::Regions;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::channel::{DropRun, MoveRun, RUNS_MAX};
use memfold_sys::port::{Outcome, Port, SharedChannel};
use memfold_sys::uffd::is_unseen;
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

impl Run {
    /// Adds to a result the pages that lie at their places though it was not told that they were moved.
    /// `EAGAIN`, and `ENOENT` where a mapping left, come without a look at the pages, which an earlier try
    /// may have moved and forgotten; see [`Uffd::move_pages`](memfold_sys::uffd::Uffd::move_pages).
    fn count_forgotten(&self, result: &mut MoveRun, mut is_staged: impl FnMut(StageIndex) -> bool) {
        let (Some(first), true) = (self.place, is_unseen(Errno(result.errno))) else {
            return;
        };
        let rest = result.moved..self.pages;
        let forgotten = rest.take_while(|step| is_staged(StageIndex(first.0 + step)));
        let forgotten = forgotten.count() as u32;
        if forgotten > 0 {
            result.moved += forgotten;
            // The error was that of the first of these: nothing is known of the page behind them.
            result.errno = Errno::EAGAIN.0;
        }
    }
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

    /// Whether the helper has a command that it has not done.
    pub fn waits_for_helper(&self) -> bool {
        (self.batch.is_some() || self.relieved) && !self.port.is_done()
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
        self.note_posted();
        mover.batch = Some(Batch { moves, drops });
    }

    /// Applies the outcome of the last command if it is there.
    pub fn settle(&self, gate: &impl Inside) -> Option<Settled> {
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
        let mut outcome = mover.port.outcome(drops, moves)?;
        let batch = mover.batch.take()?;
        self.count_forgotten(&batch, &mut outcome);
        Some(self.settle_batch(gate, &batch, &outcome))
    }

    pub fn settle_batch(&self, gate: &impl Inside, batch: &Batch, outcome: &Outcome) -> Settled {
        let mut settled = Settled::default();
        self.settle_drops(batch, outcome, &mut settled);
        for (index, run) in batch.moves.iter().enumerate() {
            let result = outcome.moves.get(index);
            match run.place {
                Some(place) => {
                    let result = result.filter(|_| !outcome.stale);
                    self.settle_move(gate, run, place, result, &mut settled);
                }
                None => settled.unshared += self.settle_unshare(gate, run, result),
            }
        }
        self.add_resident_pages(-(settled.dropped as i64));
        settled
    }

    /// Adds the pages that the helper moved and was not told of, where it could not look.
    fn count_forgotten(&self, batch: &Batch, outcome: &mut Outcome) {
        if outcome.stale {
            return;
        }
        let mut in_stage = None;
        let mut is_staged = |place| {
            let in_stage = in_stage.get_or_insert_with(|| {
                self.in_stage().unwrap_or_else(|error| {
                    log::debug!("what was moved is as the helper says, unseen: {error}");
                    Regions::default()
                })
            });
            in_stage.containing(self.stage_page(place)).is_some()
        };
        for (run, result) in batch.moves.iter().zip(&mut outcome.moves) {
            run.count_forgotten(result, &mut is_staged);
        }
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
    fn settle_unshare(&self, gate: &impl Inside, run: &Run, result: Option<&MoveRun>) -> usize {
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
            let entry = gate.table().entry(run.page.plus(u64::from(step)));
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
        gate: &impl Inside,
        run: &Run,
        first: StageIndex,
        result: Option<&MoveRun>,
        settled: &mut Settled,
    ) {
        let moved = result.map_or(0, |result| result.moved.min(run.pages));
        let errno = result.map_or(Errno::EAGAIN, |result| Errno(result.errno));
        let mut stage = lock(&self.stage);
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

/// What a helper says of a move, whatever it says.
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing {
    use super::Run;
    use crate::page::VirtualPage;
    use crate::page_state::StageIndex;
    use memfold_sys::Errno;
    use memfold_sys::channel::MoveRun;

    /// A run, the result of it, and which pages lie in the stage, a bit each.
    pub fn outcome(input: &[u8]) {
        let mut words = input.chunks_exact(4).map(|word| {
            let word = word.try_into().expect("four bytes");
            u32::from_le_bytes(word)
        });
        let mut next = || words.next().unwrap_or(0);
        let pages = next() % 512;
        let first = next() % 2048;
        let run = Run {
            page: VirtualPage(u64::from(next())),
            pages,
            place: next().is_multiple_of(2).then_some(StageIndex(first)),
        };
        let said = MoveRun {
            moved: next(),
            errno: next().cast_signed(),
            ..MoveRun::default()
        };
        let staged = next();
        let mut looked = 0;
        let mut result = said;
        run.count_forgotten(&mut result, |place| {
            looked += 1;
            let step = place.0.checked_sub(first).expect("a place of the run's");
            assert!(step < pages, "a place of the run's");
            staged >> (step % 32) & 1 == 1
        });
        assert!(looked <= pages);
        assert!(result.moved >= said.moved, "what was moved stays so");
        if result.moved != said.moved {
            assert!(result.moved <= pages && result.errno == Errno::EAGAIN.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is made of a result for a run of 8 pages, of which these are in the stage.
    fn counted(moved: u32, errno: Errno, staged: [u32; 3]) -> (u32, Errno) {
        let run = Run {
            page: VirtualPage(7),
            pages: 8,
            place: Some(StageIndex(100)),
        };
        let mut result = MoveRun {
            moved,
            errno: errno.0,
            ..MoveRun::default()
        };
        run.count_forgotten(&mut result, |place| staged.contains(&(place.0 - 100)));
        (result.moved, Errno(result.errno))
    }

    #[test]
    fn what_arrived_unseen_is_counted() {
        for errno in [Errno::EAGAIN, Errno::ENOENT] {
            assert_eq!(counted(0, errno, [0, 1, 5]), (2, Errno::EAGAIN));
            assert_eq!(counted(5, errno, [5, 6, 7]), (8, Errno::EAGAIN));
            // What lies behind a gap is somebody else's, and what is known already is not looked at.
            assert_eq!(counted(0, errno, [1, 2, 3]), (0, errno));
            assert_eq!(counted(4, errno, [0, 1, 2]), (4, errno));
            assert_eq!(counted(u32::MAX, errno, [0, 1, 2]), (u32::MAX, errno));
        }
    }

    #[test]
    fn what_the_kernel_saw_is_as_it_says() {
        for errno in [Errno::EEXIST, Errno::EBUSY, Errno(0)] {
            assert_eq!(counted(3, errno, [3, 4, 5]), (3, errno));
        }
    }
}
