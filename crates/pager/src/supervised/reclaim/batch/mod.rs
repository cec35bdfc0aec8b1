//! Batches: victims to move to the stage, and dead places of the stage to free.
//!
//! At most one batch per address space is in flight. The thread that needs its outcome first settles
//! it.

pub(crate) mod carried;
pub(crate) mod plan;
pub(crate) mod post;
pub(crate) mod settle;

use crate::page::{PageRange, VirtualPage};
use crate::page_state::StageIndex;
use crate::range_set::RangeSet;
use crate::supervised::kernel::{ChannelFile, Port, SharedChannel};
use memfold_sys::Errno;
use memfold_sys::channel::MoveRun;
use memfold_sys::uffd::is_unseen;
use std::sync::Arc;

/// A run of contiguous pages of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// The first page.
    pub page: VirtualPage,
    /// Number of pages.
    pub pages: u32,
    /// First of the contiguous places to which the `Moving` pages are moved; `None` to break COW of
    /// pages that stay `Resident`.
    pub place: Option<StageIndex>,
}

impl Run {
    /// The pages.
    pub(crate) fn range(&self) -> PageRange {
        PageRange {
            start: self.page,
            end: self.page.plus(u64::from(self.pages)),
        }
    }

    /// Adds pages to a result that arrived in the stage without being reported. For EAGAIN, and for
    /// ENOENT of a missing mapping, the kernel returns before it looks at the pages, and an earlier try
    /// may have moved some of them; see [`Uffd::move_pages`](memfold_sys::uffd::Uffd::move_pages).
    fn count_unreported(
        &self,
        result: &mut MoveRun,
        mut is_staged: impl FnMut(StageIndex) -> bool,
    ) {
        let (Some(first), true) = (self.place, is_unseen(Errno(result.errno))) else {
            return;
        };
        let rest = result.moved..self.pages;
        let unreported = rest.take_while(|step| is_staged(StageIndex(first.0 + step)));
        let unreported = unreported.count() as u32;
        if unreported > 0 {
            result.moved += unreported;
            // The error was of the first of these pages; the next page has none yet.
            result.errno = Errno::EAGAIN.0;
        }
    }
}

/// The work of one command to the helper: pages to move to the stage or to break COW of, and places to
/// free.
///
/// | step | file | by |
/// |---|---|---|
/// | `Batch::plan` | `plan` | a round |
/// | `Batch::post` | `post` | a round |
/// | `Batch::settle` | `settle` | the thread that needs the outcome first: a round, a fault on a page of the batch, an event or a fork |
/// | `Batch::settle_with` | `settle` | the handler that takes the gate over from a stopped helper |
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Pages to move, or to break COW of. A run that was carried off has none once it is settled.
    pub moves: Vec<Run>,
    /// Runs of dead places to free, as (first, pages).
    pub drops: Vec<(StageIndex, u32)>,
}

impl Batch {
    /// Whether the batch has no work.
    pub(crate) fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.drops.is_empty()
    }
}

/// The supervisor's end of a helper's channel, with the batch in flight. Guarded by a mutex of the
/// address space.
pub(crate) struct HelperPort {
    /// Posts commands and reads outcomes.
    pub port: Port,
    /// The channel's descriptor, until it is handed to the program.
    file: Option<ChannelFile>,
    /// The batch in flight.
    pub batch: Option<Batch>,
    /// The gate was taken over from the helper, which was stopped inside. The rest of its command has
    /// no effect, and it gets no other command until it is done with this one.
    pub taken_over: bool,
    /// The stage is not registered, so that the kernel refuses to move pages there.
    pub stage_closed: bool,
    /// Runs that were settled as their events were read, and not noted by the reclaimer.
    pub carried: Settled,
    /// What was carried off and is settled, but of which the event is unread.
    pub unread: Option<Carried>,
    /// A run was settled or its event read, and it is not looked yet which pages were carried off (`resolve_overrun`).
    pub is_unresolved: bool,
    /// What changed since the batch was posted, until its runs are settled, their events read, and they are resolved.
    pub overrun: Overrun,
}

/// Changes by which it may be unknown what was carried off: see `resolve_overrun`.
#[derive(Debug, Default)]
pub(crate) struct Overrun {
    /// Where pages were moved that were `Removed`: they may be there or not.
    pub removed_moved: RangeSet,
    /// Where memory was moved that was registered but not managed, so that its resident pages are not known.
    pub unmanaged_moved: RangeSet,
    /// Places, by their pages, whose owners were unmapped.
    pub unmapped: RangeSet,
}

/// A run of pages that the helper carries off by `mremap`, as the kernel has no `UFFDIO_MOVE`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Carried {
    /// The pages.
    pub from: PageRange,
    /// The first of the contiguous places.
    pub place: StageIndex,
    /// Which run of its batch it is.
    pub index: usize,
    /// Number of `madvise` events that were read by the time it was settled.
    pub removals: u32,
}

/// Number of pages of a settled batch, by their new state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Settled {
    /// Pages moved to the stage.
    pub staged: usize,
    /// Pages freed from the stage.
    pub dropped: usize,
    /// Pages whose COW was broken, and that stay resident.
    pub cow_broken: usize,
}

impl HelperPort {
    /// The port of a new channel.
    pub(crate) fn new(port: Port, file: ChannelFile) -> HelperPort {
        HelperPort {
            port,
            file: Some(file),
            batch: None,
            taken_over: false,
            stage_closed: false,
            carried: Settled::default(),
            unread: None,
            is_unresolved: false,
            overrun: Overrun::default(),
        }
    }

    /// Takes the channel's descriptor, to hand it to the program.
    pub(crate) fn take_file(&mut self) -> Option<ChannelFile> {
        self.file.take()
    }

    /// The memory shared with the helper.
    pub(crate) fn channel(&self) -> &Arc<SharedChannel> {
        self.port.shared()
    }

    /// Whether no command may be posted now. A command frees places, in which pages may be that are not found as yet.
    pub(crate) fn is_busy(&self) -> bool {
        self.batch.is_some() || self.taken_over || self.stage_closed || self.is_unresolved
    }

    /// Whether a command is in flight and the helper is not done with it.
    pub(crate) fn waits_for_helper(&self) -> bool {
        (self.batch.is_some() || self.taken_over) && !self.port.is_done()
    }

    /// The sequence number of the last command, to wait for.
    pub(crate) fn posted(&self) -> u32 {
        self.port.posted()
    }
}

/// Fuzz target: arbitrary results of a helper.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing {
    use super::Run;
    use crate::page::VirtualPage;
    use crate::page_state::StageIndex;
    use memfold_sys::Errno;
    use memfold_sys::channel::MoveRun;

    /// The input encodes a run, its result, and a bitmap of the pages in the stage.
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
        let reported = MoveRun {
            moved: next(),
            errno: next().cast_signed(),
            ..MoveRun::default()
        };
        let staged = next();
        let mut looked = 0;
        let mut result = reported;
        run.count_unreported(&mut result, |place| {
            looked += 1;
            let step = place.0.checked_sub(first).expect("a place of the run");
            assert!(step < pages, "a place of the run");
            staged >> (step % 32) & 1 == 1
        });
        assert!(looked <= pages);
        assert!(result.moved >= reported.moved, "moved pages stay moved");
        if result.moved != reported.moved {
            assert!(result.moved <= pages && result.errno == Errno::EAGAIN.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The corrected result for a run of 8 pages, of which `staged` are in the stage.
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
        run.count_unreported(&mut result, |place| staged.contains(&(place.0 - 100)));
        (result.moved, Errno(result.errno))
    }

    #[test]
    fn unreported_arrivals_are_counted() {
        for errno in [Errno::EAGAIN, Errno::ENOENT] {
            assert_eq!(counted(0, errno, [0, 1, 5]), (2, Errno::EAGAIN));
            assert_eq!(counted(5, errno, [5, 6, 7]), (8, Errno::EAGAIN));
            // Pages after a gap do not count, and reported pages are not looked up.
            assert_eq!(counted(0, errno, [1, 2, 3]), (0, errno));
            assert_eq!(counted(4, errno, [0, 1, 2]), (4, errno));
            assert_eq!(counted(u32::MAX, errno, [0, 1, 2]), (u32::MAX, errno));
        }
    }

    #[test]
    fn errors_after_a_look_at_the_page_are_final() {
        for errno in [Errno::EEXIST, Errno::EBUSY, Errno(0)] {
            assert_eq!(counted(3, errno, [3, 4, 5]), (3, errno));
        }
    }
}
