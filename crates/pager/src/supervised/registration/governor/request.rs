//! The two steps of a request that need the events of all of the program's changes: to begin and to finish it.

use super::messages::MessageService;
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::fault::listen::Handlers;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use crate::time::Instant;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the gate of a thread that waits for the program. Longer outlasts more of the other threads that
/// read its messages; shorter gives up, and another thread is started later.
const PATIENCE: Duration = Duration::from_secs(10);

/// A range that a program wants to be unregistered, which became unmanaged.
#[derive(Clone)]
pub(super) struct Request {
    /// Number of the request in the channel.
    pub(super) number: u32,
    pub(super) range: PageRange,
    /// The parts that were managed.
    managed: RangeSet,
    /// Where the recall continues.
    pub(super) next: VirtualPage,
    pub(super) since: Instant,
    /// Time of the answer.
    pub(super) answered: Option<Instant>,
}

/// What became of a step that waited for the program.
pub(super) enum Outcome {
    /// The request, if it was begun.
    Begun(Option<Request>),
    /// The range, and whether it was unregistered.
    Finished(PageRange, bool),
    /// Whether no page of the program is out.
    AllBack(bool),
}

/// The step that begins a request, for a thread that may wait for the program.
pub(super) fn begin_patiently(
    handlers: Arc<Handlers>,
    space: Arc<AddressSpace>,
    range: PageRange,
    number: u32,
) -> io::Result<impl FnOnce() -> Outcome + Send + 'static> {
    let mut messages = MessageService::that_waits(handlers, PATIENCE)?;
    Ok(move || Outcome::Begun(messages.begin(&space, range, number)))
}

/// The step that finishes a request, for a thread that may wait for the program.
pub(super) fn finish_patiently(
    handlers: Arc<Handlers>,
    space: Arc<AddressSpace>,
    request: Request,
) -> io::Result<impl FnOnce() -> Outcome + Send + 'static> {
    let mut messages = MessageService::that_waits(handlers, PATIENCE)?;
    Ok(move || {
        let is_done = messages.finish(&space, &request) == Some(true);
        Outcome::Finished(request.range, is_done)
    })
}

/// The look whether all of a program is back, for a thread that may wait for the program.
pub(super) fn look_patiently(
    handlers: Arc<Handlers>,
    space: Arc<AddressSpace>,
) -> io::Result<impl FnOnce() -> Outcome + Send + 'static> {
    let mut messages = MessageService::that_waits(handlers, PATIENCE)?;
    Ok(move || Outcome::AllBack(messages.is_all_back(&space) == Some(true)))
}

impl MessageService {
    /// Whether no page is out anywhere, wherever the program has moved it, and none is on its way. Where nothing is
    /// managed and nothing comes to be, that stays so. `None` if the gate is not available, or a change is in progress.
    pub(super) fn is_all_back(&mut self, space: &Arc<AddressSpace>) -> Option<bool> {
        let mut gate = space.exclusive_within(self.patience).ok()?;
        let messages = self.read_pending_events(space, &mut gate)?;
        // A batch that the helper has not begun is stale from now on.
        space.begin_events(&gate);
        let is_back = !space.is_changing() && !is_any_out(&gate, PageTable::everything());
        drop(gate);
        self.serve(space, messages);
        Some(is_back)
    }

    /// Makes the range unmanaged. `None` if the gate is not available, or a change is in progress.
    pub(super) fn begin(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        number: u32,
    ) -> Option<Request> {
        let mut gate = space.exclusive_within(self.patience).ok()?;
        let messages = self.read_pending_events(space, &mut gate)?;
        let mut managed = RangeSet::default();
        let mut regions = lock(&space.managed);
        let parts = regions.covered(range);
        parts.into_iter().for_each(|part| managed.add(part));
        regions.remove(range);
        drop(regions);
        drop(gate);
        self.serve(space, messages);
        Some(Request {
            number,
            range,
            managed,
            next: range.start,
            since: Instant::now(),
            answered: None,
        })
    }

    /// Unregisters the range if no page of it is out, and returns whether it did. `None` if the gate is not
    /// available, or a change is in progress.
    pub(super) fn finish(&mut self, space: &Arc<AddressSpace>, request: &Request) -> Option<bool> {
        let mut gate = space.exclusive_within(self.patience).ok()?;
        let messages = self.read_pending_events(space, &mut gate)?;
        // A batch that the helper has not begun is stale from now on.
        space.begin_events(&gate);
        let is_ready = !space.is_changing()
            && !is_any_out(&gate, request.range)
            && !is_breaking_cow(space, request.range);
        if is_ready {
            unregister_range(space, &mut gate, request);
        }
        drop(gate);
        self.serve(space, messages);
        Some(is_ready)
    }
}

/// Whether a page of the range is neither resident nor a hole. A `Moving` page is resident, because its
/// batch is stale.
fn is_any_out(gate: &Exclusive<'_>, range: PageRange) -> bool {
    let mut any = false;
    gate.table().visit(range, |_, entry| {
        any = matches!(
            entry.load(),
            PageState::Swapped(..)
                | PageState::Filling(..)
                | PageState::Staged(_)
                | PageState::Returning(_)
                | PageState::Clearing
        );
        !any
    });
    any
}

/// Whether the helper may be about to write to pages of the range to break COW, which it does outside
/// the gate.
fn is_breaking_cow(space: &AddressSpace, range: PageRange) -> bool {
    let port = lock(&space.helper_port);
    let mut runs = port.batch.iter().flat_map(|batch| &batch.moves);
    let is_any = runs.any(|run| {
        let end = run.page.plus(u64::from(run.pages));
        let start = run.page;
        run.place.is_none() && !range.intersection(PageRange { start, end }).is_empty()
    });
    if is_any && port.waits_for_helper() {
        // This waits for it, and maybe nobody else.
        space.channel.wake_helper();
    }
    is_any
}

/// Unregisters a range and makes it unmanaged. A part that the kernel refuses to unregister is
/// unmanaged, too; its faults are served like those of any unknown page.
fn unregister_range(space: &AddressSpace, gate: &mut Exclusive<'_>, request: &Request) {
    let mut ours = request.managed.clone();
    let arrived = lock(&space.managed).covered(request.range);
    arrived.into_iter().for_each(|part| ours.add(part));
    add_unmanaged(space, request.range, &mut ours);
    for part in ours.ranges() {
        let _ = space.uffd().unregister(*part);
    }
    space.apply_unmap(gate, request.range);
    space.unregistered.fetch_add(1, Ordering::Relaxed);
    lock(&space.refused).note(request.range);
}

/// Adds the parts of a range that are registered with memfold's userfaultfd but were never managed. To
/// find them, it registers each part again, which succeeds unless another userfaultfd has it.
fn add_unmanaged(space: &AddressSpace, range: PageRange, ours: &mut RangeSet) {
    let areas = space
        .attached()
        .and_then(|attached| attached.inspector.vmas().ok());
    for area in areas.iter().flatten().filter(|area| area.is_movable()) {
        let part = PageRange::of_addresses(area.start, area.end).intersection(range);
        for piece in ours.uncovered(part) {
            if space.register(piece).is_ok() {
                ours.add(piece);
            }
        }
    }
}
