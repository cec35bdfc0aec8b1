//! A program that is stopped while its helper is in the gate.
//!
//! Whoever stops all threads of a program, a debugger or a check for leaks, stops its helper, too, and
//! may read its memory then. If the helper is in the gate just then, no message can be read, and
//! what it has moved already cannot be brought back, until it goes on: for whoever waits for a page
//! before it lets the program go on, never. So the supervisor takes the helper's share of the gate:
//!
//! 1. The stage is registered no more: the kernel refuses whatever the helper would still move when
//!    it goes on. What lies in the stage from then on is what was moved.
//! 2. The helper's bit of the gate becomes one of the supervisor's shares. If it has gone on meanwhile
//!    and left, that fails, and all is as ever.
//! 3. The batch is settled by what lies in the stage, before the share is given up.
//!
//! The helper gets no other command until it has done this one; then the stage is registered again.

use crate::address_space::{AddressSpace, Attached};
use crate::group::lock;
use crate::mover::{Batch, Mover, Settled};
use crate::page::{PageRange, VirtualPage};
use crate::regions::Regions;
use crate::stage::StageIndex;
use memfold_sys::Errno;
use memfold_sys::channel::{DropRun, MoveRun};
use memfold_sys::port::Outcome;

impl AddressSpace {
    /// Takes the gate from a helper that is stopped in it. `false` if it is not.
    pub fn relieve_helper(&self) -> bool {
        let Some(attached) = self
            .attached()
            .filter(|attached| attached.inspector.is_stopped())
        else {
            return false;
        };
        let mut mover = lock(&self.mover);
        if mover.batch.is_none() {
            // It was stopped on its way out: what it did is settled.
            let relieved = self.channel.gate().relieve_helper();
            if relieved {
                self.channel.gate().leave_shared();
            }
            return relieved;
        }
        if !self.close_stage(attached) {
            return false;
        }
        let looked = mover
            .batch
            .as_ref()
            .and_then(|batch| self.look(attached, batch));
        let (Some(outcome), true) = (looked, self.channel.gate().relieve_helper()) else {
            // It went on, and what it could not move stays where it is.
            self.open_stage(attached);
            return false;
        };
        mover.relieved = true;
        let batch = mover.batch.take().unwrap_or_default();
        drop(mover);
        let mut settled = Settled::default();
        self.settle_batch(&batch, &outcome, &mut settled);
        self.channel.gate().leave_shared();
        log::debug!("a program was stopped while its helper moved pages; its gate is taken over");
        true
    }

    /// Once a relieved helper has gone on and done its command, it is given others again.
    pub fn take_back(&self, mover: &mut Mover) {
        if let Some(attached) = self.attached()
            && mover.port.outcome(0, 0).is_some()
        {
            self.open_stage(attached);
            mover.relieved = false;
        }
    }

    fn close_stage(&self, attached: &Attached) -> bool {
        let stage = attached.arena.stage;
        let length = stage.end.address() - stage.start.address();
        self.uffd()
            .unregister(stage.start.address(), length)
            .is_ok()
    }

    fn open_stage(&self, attached: &Attached) {
        let stage = attached.arena.stage;
        let length = stage.end.address() - stage.start.address();
        // Fails only if the address space is gone; otherwise nothing would be moved out any more.
        if let Err(errno) = self.uffd().register(stage.start.address(), length) {
            log::debug!("a stage cannot be registered again: {errno}");
        }
    }

    /// What became of a command, by what is in memory. `None` if that cannot be seen.
    fn look(&self, attached: &Attached, batch: &Batch) -> Option<Outcome> {
        let present = |range: PageRange| {
            let (start, end) = (range.start.address(), range.end.address());
            let runs = attached.inspector.present(start, end).ok()?;
            let mut regions = Regions::default();
            for (start, end) in runs {
                regions.add(PageRange::of_addresses(start, end));
            }
            Some(regions)
        };
        let staged = present(attached.arena.stage)?;
        let is_staged = |place: StageIndex| {
            let page = VirtualPage::containing(self.stage_address(place));
            staged.containing(page).is_some()
        };
        let errno = Errno::EAGAIN.0;
        let drops = batch.drops.iter().map(|(first, pages)| {
            let left = (0..*pages).any(|step| is_staged(StageIndex(first.0 + step)));
            DropRun {
                errno: if left { errno } else { 0 },
                ..DropRun::default()
            }
        });
        let moves = batch.moves.iter().map(|run| {
            let still = present(PageRange {
                start: run.page,
                end: run.page.plus(u64::from(run.pages)),
            })?;
            let stays = |step: u32| still.containing(run.page.plus(u64::from(step))).is_some();
            let arrived = |step: u32| {
                run.place
                    .is_some_and(|first| is_staged(StageIndex(first.0 + step)))
            };
            let is_moved = |step: &u32| !stays(*step) && arrived(*step);
            let moved = (0..run.pages).take_while(is_moved).count() as u32;
            // As the helper would have found the page that it came to.
            let errno = match moved < run.pages {
                true if run.place.is_some() && arrived(moved) => Errno::EEXIST.0,
                true if run.place.is_some() && !stays(moved) => Errno::ENOENT.0,
                _ => errno,
            };
            Some(MoveRun {
                moved,
                errno,
                ..MoveRun::default()
            })
        });
        Some(Outcome {
            stale: false,
            drops: drops.collect(),
            moves: moves.collect::<Option<_>>()?,
        })
    }
}
