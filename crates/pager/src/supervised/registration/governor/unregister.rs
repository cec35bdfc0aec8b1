//! Memory that a program registers with a userfaultfd of its own.
//!
//! A VMA can be registered with one userfaultfd only. If memfold has registered it, the preload library
//! requests the range on behalf of the program (`ioctl.rs` of the agent), and retries once the request
//! is answered:
//!
//! 1. The range becomes unmanaged, so that no more victims are taken from it.
//! 2. Pages that are out are brought back, in slices.
//! 3. Under the exclusive gate, with no change in progress, the range is unregistered. Batches planned
//!    before are stale; faults read before are not served any more.
//! 4. Until the program has registered the range, none of its mappings are registered. From then on the
//!    kernel refuses to register the range (`refused.rs`).

use super::recall::SLICE;
use super::{GATE_PATIENCE, Governor};
use crate::page::{PageRange, VirtualPage};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::events::read::Messages;
use crate::supervised::kernel::{Memory, Process};
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::PAGE_SIZE;
use memfold_sys::port::UnregisterWanted;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time after the answer in which the program may register the range. Longer leaves new mappings
/// unmanaged for longer.
const ANSWERED: Duration = Duration::from_secs(1);
/// Time after which a request fails: the range becomes managed again, and the program's ioctl is
/// refused. Longer blocks the program for longer.
const PATIENCE: Duration = Duration::from_secs(600);

/// Tries, one a tick, that may meet a change in progress before the governor waits for its end. More block
/// a program that never pauses for longer; fewer let it hold up the governor sooner.
const MISSED_MOST: u32 = 100;

/// Interval at which resident pages of refused ranges are counted. Longer costs less and adjusts the
/// limit later.
const COUNT_INTERVAL: Duration = Duration::from_millis(250);

/// Requests in progress. The governor owns it.
#[derive(Default)]
pub struct Unregistering {
    /// By ID of the address space.
    requests: HashMap<u64, Request>,
    /// Number of tries in a row that met a change in progress.
    missed: u32,
    /// Time of the last count of refused pages.
    counted: Option<Instant>,
}

pub(super) struct Request {
    /// Number of the request in the channel.
    number: u32,
    pub(super) range: PageRange,
    /// The parts that were managed.
    managed: RangeSet,
    /// Where the recall continues.
    pub(super) next: VirtualPage,
    since: Instant,
    answered: Option<Instant>,
}

impl Unregistering {
    /// Whether mappings of this program must not be registered for the moment.
    pub fn is_pending(&self, space: &AddressSpace) -> bool {
        self.requests.get(&space.id).is_some_and(|request| {
            let is_over = |at: Instant| at.elapsed() > ANSWERED;
            !request.answered.is_some_and(is_over)
        })
    }
}

impl Governor {
    /// Serves the programs' requests. Returns whether a program still waits.
    pub(super) fn unregister_for_programs(&mut self, spaces: &[Arc<AddressSpace>]) -> bool {
        let gone = |id: &u64| !spaces.iter().any(|space| space.id == *id);
        let requests = &mut self.unregistering.requests;
        if !requests.is_empty() {
            requests.retain(|id, _| !gone(id));
        }
        let mut is_awaited = false;
        for space in spaces {
            let Some(wanted) = space.channel.unregister_wanted() else {
                self.unregistering.requests.remove(&space.id);
                continue;
            };
            if !wanted.is_answered {
                is_awaited |= self.unregister(space, wanted);
            }
        }
        is_awaited
    }

    /// One slice of a request. Returns whether more is left.
    fn unregister(&mut self, space: &Arc<AddressSpace>, wanted: UnregisterWanted) -> bool {
        let Some(range) = range_of(space, wanted) else {
            space.channel.answer_unregister(wanted.number);
            return false;
        };
        space.channel.note_unregister_progress();
        let known = self.unregistering.requests.remove(&space.id);
        let known = known.filter(|known| known.number == wanted.number && known.range == range);
        let Some(mut request) = known.or_else(|| self.begin(space, range, wanted.number)) else {
            return true;
        };
        let recalled = self.recall(
            space,
            PageRange {
                start: request.next,
                ..range
            },
            Instant::now() + SLICE,
            |_| {},
        );
        request.next = recalled.next.unwrap_or(range.start);
        let is_done = recalled.next.is_none() && self.finish(space, &request);
        let is_over = is_done || request.since.elapsed() > PATIENCE || space.is_dead();
        if is_over {
            request.answered = Some(Instant::now());
            // If the range was not unregistered, it becomes managed again.
            space.sampling.rescan.store(true, Ordering::Relaxed);
            space.channel.answer_unregister(request.number);
        }
        self.unregistering.requests.insert(space.id, request);
        !is_over
    }

    /// Counts the resident pages of ranges that cannot be registered, and so cannot be reclaimed.
    pub(super) fn count_refused(&mut self, spaces: &[Arc<AddressSpace>]) {
        let counted = &mut self.unregistering.counted;
        if counted.is_some_and(|at| at.elapsed() < COUNT_INTERVAL) {
            return;
        }
        *counted = Some(Instant::now());
        let pages = |space: &Arc<AddressSpace>| -> u64 {
            let ranges = lock(&space.refused).ranges().to_vec();
            if space.has_left() {
                return 0;
            }
            let present = ranges.iter().map(|range| space.present(*range));
            // A program that is gone has no resident pages.
            present.flatten().map(|present| present.pages()).sum()
        };
        let refused = spaces.iter().map(pages).sum();
        self.group.refused_pages.store(refused, Ordering::Relaxed);
    }

    /// Applies the pending events of a program. `None` while a change is in progress; a program that never
    /// pauses is waited for in the end.
    fn read_in_the_end(
        &mut self,
        space: &Arc<AddressSpace>,
        gate: &mut Exclusive<'_>,
    ) -> Option<Messages> {
        let may_wait = self.unregistering.missed >= MISSED_MOST;
        let messages = self.read_pending_events(space, gate, may_wait);
        self.unregistering.missed = match messages {
            Some(_) => 0,
            None => self.unregistering.missed + 1,
        };
        messages
    }

    pub(super) fn begin(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        number: u32,
    ) -> Option<Request> {
        let mut gate = space.exclusive_within(GATE_PATIENCE).ok()?;
        let messages = self.read_in_the_end(space, &mut gate)?;
        let mut managed = RangeSet::default();
        let mut regions = lock(&space.managed);
        let parts = regions.covered(range);
        parts.into_iter().for_each(|part| managed.add(part));
        regions.remove(range);
        drop(regions);
        drop(gate);
        self.serve_messages(space, messages);
        Some(Request {
            number,
            range,
            managed,
            next: range.start,
            since: Instant::now(),
            answered: None,
        })
    }

    /// Unregisters the range if no page of it is out.
    pub(super) fn finish(&mut self, space: &Arc<AddressSpace>, request: &Request) -> bool {
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            return false;
        };
        let Some(messages) = self.read_in_the_end(space, &mut gate) else {
            return false;
        };
        // A batch that the helper has not begun is stale from now on.
        space.begin_events(&gate);
        let is_ready = !space.is_changing()
            && !is_any_out(&gate, request.range)
            && !is_breaking_cow(space, request.range);
        if is_ready {
            unregister_range(space, &mut gate, request);
            self.unregistering.counted = None;
        }
        drop(gate);
        self.serve_messages(space, messages);
        is_ready
    }
}

/// The pages of a request, which the program may have forged. `None` if they cannot be unregistered.
fn range_of(space: &AddressSpace, wanted: UnregisterWanted) -> Option<PageRange> {
    let end = wanted.start.checked_add(wanted.length)?;
    let page = PAGE_SIZE as u64;
    let is_aligned = wanted.start.is_multiple_of(page) && end.is_multiple_of(page);
    if wanted.length == 0 || !is_aligned || end > PageTable::everything().end.address() {
        return None;
    }
    let range = PageRange::of_addresses(wanted.start, end);
    let arena = &space.attached()?.arena;
    let own = PageRange::around(arena.beacon, 1);
    let is_own = !range.intersection(arena.whole).is_empty() || !range.intersection(own).is_empty();
    (!is_own).then_some(range)
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
    runs.any(|run| {
        let end = run.page.plus(u64::from(run.pages));
        let start = run.page;
        run.place.is_none() && !range.intersection(PageRange { start, end }).is_empty()
    })
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
    for area in areas.iter().flatten().filter(|area| area.movable) {
        let part = PageRange::of_addresses(area.start, area.end).intersection(range);
        for piece in ours.uncovered(part) {
            if space.uffd().register_protectable(piece).is_ok() {
                ours.add(piece);
            }
        }
    }
}
