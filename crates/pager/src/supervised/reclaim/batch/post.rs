//! Posting a batch to the helper.

use crate::supervised::reclaim::batch::{Batch, Overrun};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Inside, Shared};
use crate::sync::lock;
use memfold_sys::channel::{DropRun, MoveRun, RUNS_MAX};

impl Batch {
    /// Posts the batch as a command. The gate is held since [`Batch::plan`], so that the event count
    /// belongs to the states that the moves were planned from.
    ///
    /// # Panics
    ///
    /// If the previous batch is not settled.
    pub(crate) fn post(self, space: &AddressSpace, gate: &Shared<'_>) {
        debug_assert!(gate.is_of(space));
        let Batch { moves, drops } = self;
        assert!(
            moves.len() <= RUNS_MAX && drops.len() <= RUNS_MAX,
            "too many runs"
        );
        let mut port = lock(&space.helper_port);
        assert!(port.batch.is_none(), "the previous batch is not settled");
        let drop_runs: Vec<DropRun> = drops
            .iter()
            .map(|(place, pages)| DropRun {
                start: space.stage_address(*place),
                pages: *pages,
                errno: 0,
            })
            .collect();
        let move_runs: Vec<MoveRun> = moves
            .iter()
            .map(|run| MoveRun {
                source: run.page.address(),
                target: run.place.map_or(0, |place| space.stage_address(place)),
                pages: run.pages,
                unshare: u32::from(run.place.is_none()),
                ..MoveRun::default()
            })
            .collect();
        let count = space.channel.event_count();
        port.port.post(count, &drop_runs, &move_runs);
        space.note_posted();
        port.overrun = Overrun::default();
        port.batch = Some(Batch { moves, drops });
    }
}
