//! Batches of pages on their way to the stage, and staged pages on their way out.
//!
//! At most one batch of an address space is with its helper. The outcome is applied ("settled") by
//! whichever thread needs it first.

pub mod plan;
pub mod post;
pub mod settle;

use crate::page::VirtualPage;
use crate::page_state::StageIndex;
use memfold_sys::Errno;
use memfold_sys::channel::MoveRun;
use memfold_sys::port::{Port, SharedChannel};
use memfold_sys::uffd::is_unseen;
use std::os::fd::OwnedFd;
use std::sync::Arc;

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

/// Pages to move to the stage and places of the stage to drop: what one command asks of the helper.
///
/// | step | file | by |
/// |---|---|---|
/// | `Batch::plan` | `plan` | the reclaimer |
/// | `Batch::post` | `post` | the reclaimer |
/// | `Batch::settle` | `settle` | whichever thread needs the outcome first: the reclaimer, a fault on a page of the batch, an event or a fork over it |
/// | `Batch::settle_with` | `settle` | the handler that takes the gate over from a stopped helper |
#[derive(Debug, Default)]
pub struct Batch {
    pub moves: Vec<Run>,
    pub drops: Vec<(StageIndex, u32)>,
}

impl Batch {
    /// Whether there is nothing to ask for.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.drops.is_empty()
    }
}

/// The supervisor's end of a helper's channel, with the batch that was posted and is not settled yet.
pub struct HelperPort {
    pub port: Port,
    /// The channel's descriptor, until it is handed to the program.
    file: Option<OwnedFd>,
    pub batch: Option<Batch>,
    /// The gate was taken over from the helper, which was stopped in it. What the helper still does of
    /// its command has no effect, and it takes no other command until it has done this one.
    pub taken_over: bool,
    /// The stage is not registered, so that nothing can be moved there.
    pub stage_closed: bool,
}

/// How many pages of a settled batch changed state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settled {
    pub staged: usize,
    pub dropped: usize,
    /// Pages whose COW was broken; they stay where they are.
    pub cow_broken: usize,
}

impl HelperPort {
    pub fn new(port: Port, file: OwnedFd) -> HelperPort {
        HelperPort {
            port,
            file: Some(file),
            batch: None,
            taken_over: false,
            stage_closed: false,
        }
    }

    /// The descriptor to hand to the program; once.
    pub fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    pub fn channel(&self) -> &Arc<SharedChannel> {
        self.port.shared()
    }

    /// Whether no command can be posted now.
    pub fn is_busy(&self) -> bool {
        self.batch.is_some() || self.taken_over || self.stage_closed
    }

    /// Whether the helper has a command that is not done.
    pub fn waits_for_helper(&self) -> bool {
        (self.batch.is_some() || self.taken_over) && !self.port.is_done()
    }

    /// The sequence number of the last command, to wait for.
    pub fn posted(&self) -> u32 {
        self.port.posted()
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
