//! A program that is stopped while its helper is in the gate.
//!
//! A debugger or leak checker that stops all threads of a program stops its helper, too, and may read the
//! program's memory then. If the helper is inside the gate at that moment, no message can be read, and the
//! pages that it has moved cannot be brought back until it continues: never, if the debugger waits for such
//! a page before it lets the program continue. So the supervisor takes over the helper's share of the gate:
//!
//! 1. The stage is unregistered: the kernel refuses all further moves of the helper. What lies in the stage
//!    from then on is what was moved.
//! 2. A thread that holds the supervisor's word of the gate clears the helper's bit. If the helper has
//!    continued meanwhile and left, this fails, and nothing has changed.
//! 3. The batch is settled by what lies in the stage, before the gate is left.
//!
//! The same goes for a helper that ended in the gate, while another process is in the address space yet:
//! the child of a `vfork` whose parent was killed. (Where pages are carried off, no page of the stage is registered, and
//! the first step would refuse nothing: the gate is taken over from a helper that ended, alone.)
//!
//! The helper gets no other command until it has done this one; then the stage is registered again.

use crate::page::PageRange;
use crate::page_state::StageIndex;
use crate::supervised::kernel::Memory;
use crate::supervised::reclaim::batch::carried::drops_of;
use crate::supervised::reclaim::batch::{Batch, HelperPort};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::GATE_PATIENCE;
use crate::sync::lock;
use memfold_sys::Errno;
use memfold_sys::channel::MoveRun;
use memfold_sys::port::Outcome;

/// Pages behind the stage, where a helper proves which address space it is of (`helper/admission.rs`).
pub(crate) const PROOF_PAGES: u64 = 1;

/// The stage with the pages behind it, which are registered with it.
fn with_proof(stage: PageRange) -> PageRange {
    PageRange {
        start: stage.start,
        end: stage.end.plus(PROOF_PAGES),
    }
}

impl AddressSpace {
    /// Takes the gate from a helper that is stopped in it, or ended there. `false` if it is not.
    pub(crate) fn take_over_gate(&self) -> bool {
        if !self.channel.helper_gate().is_inside() {
            return false;
        }
        let Some(attached) = self
            .attached()
            .filter(|attached| attached.inspector.stands_still())
        else {
            return false;
        };
        let Ok(gate) = self.shared_within(GATE_PATIENCE) else {
            return false;
        };
        let mut port = lock(&self.helper_port);
        if port.batch.is_none() {
            // It was stopped on its way out: what it did is settled.
            return self.channel.helper_gate().relieve();
        }
        let carries = self.resources.carries();
        if carries && !attached.inspector.thread_has_ended() {
            // Nothing keeps it from carrying pages off when it goes on, but it has not yet.
            return false;
        }
        if !carries {
            if self.close_stage(attached.arena.stage).is_err() {
                return false;
            }
            port.stage_closed = true;
        }
        let looked = port.batch.as_ref().and_then(|batch| self.look(batch));
        let (Some(outcome), true) = (looked, self.channel.helper_gate().relieve()) else {
            // It went on, and what it could not move stays where it is.
            if !carries {
                self.reopen_stage(&mut port);
            }
            return false;
        };
        port.taken_over = true;
        let batch = port.batch.take().unwrap_or_default();
        drop(port);
        batch.settle_with(self, &gate, &outcome);
        drop(gate);
        log::debug!("a helper was stopped, or ended, while it moved pages; its gate is taken over");
        true
    }

    fn close_stage(&self, stage: PageRange) -> Result<(), Errno> {
        self.uffd().unregister(with_proof(stage))
    }

    /// Registers the stage, with the page behind it: nothing can be moved there before.
    pub(crate) fn open_stage(&self, stage: PageRange) -> Result<(), Errno> {
        self.uffd().register(with_proof(stage))
    }

    /// Unregisters the stage, but not the page behind it, where pages are carried off: those that are bring their own
    /// registration, and what they replace must raise no event.
    pub(crate) fn leave_stage(&self, stage: PageRange) -> Result<(), Errno> {
        if self.resources.carries() {
            self.uffd().unregister(stage)?;
        }
        Ok(())
    }

    /// Registers the stage again after the gate was taken over. Where the kernel has no memory for it, that is tried again
    /// later.
    pub(crate) fn reopen_stage(&self, port: &mut HelperPort) {
        if let Some(attached) = self.attached() {
            port.stage_closed = self.open_stage(attached.arena.stage).is_err();
        }
    }

    /// What became of a command, by what is in memory. `None` if that cannot be seen.
    fn look(&self, batch: &Batch) -> Option<Outcome> {
        let in_stage = self.in_stage().ok()?;
        let is_staged = |place| in_stage.containing(self.stage_page(place)).is_some();
        let errno = Errno::EAGAIN.0;
        let drops = drops_of(&batch.drops, is_staged);
        let sources = batch.moves.iter().map(|run| {
            let end = run.page.plus(u64::from(run.pages));
            let start = run.page;
            self.present(PageRange { start, end }).ok()
        });
        let sources = sources.collect::<Option<Vec<_>>>()?;
        // What is where the pages were may be others then, and these may have left without being moved.
        // No thread reads an event while the helper is inside, so a change does not end unseen.
        let changing = self.is_changing();
        let moves = batch.moves.iter().zip(sources).map(|(run, still)| {
            let stays = |step: u32| still.containing(run.page.plus(u64::from(step))).is_some();
            let arrived = |step: u32| {
                run.place
                    .is_some_and(|first| is_staged(StageIndex(first.0 + step)))
            };
            let is_moved = |step: &u32| arrived(*step) && (changing || !stays(*step));
            let moved = (0..run.pages).take_while(is_moved).count() as u32;
            // As the helper would have found the page that it came to.
            let errno = match moved < run.pages && !changing {
                true if run.place.is_some() && arrived(moved) => Errno::EEXIST.0,
                true if run.place.is_some() && !stays(moved) => Errno::ENOENT.0,
                _ => errno,
            };
            MoveRun {
                moved,
                errno,
                ..MoveRun::default()
            }
        });
        Some(Outcome {
            stale: false,
            drops,
            moves: moves.collect(),
        })
    }
}
