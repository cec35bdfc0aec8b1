//! Memory that a program registers with a userfaultfd of its own.
//!
//! The kernel lets one userfaultfd have a mapping. Where memfold has it, the preload library asks for it
//! in the program's stead (`ioctl.rs` of the agent), and tries again once it was answered:
//!
//! 1. The range is managed no more, so that nothing of it is planned to go out.
//! 2. What is out of it comes back, in slices.
//! 3. With the gate held exclusively and no change under way, it is unregistered. What was planned
//!    before is stale; faults that were told before are not served any more.
//! 4. Until the program has registered the range, no mappings of it are taken over. From then on the
//!    kernel refuses memfold that memory (`refused.rs`), for as long as the program keeps it.

use super::recall::SLICE;
use super::{GATE_PATIENCE, Governor};
use crate::page::{PageRange, VirtualPage, bytes};
use crate::page_state::PageState;
use crate::page_table::PageTable;
use crate::range_set::RangeSet;
use crate::supervised::space::AddressSpace;
use crate::supervised::space::gate::{Exclusive, Inside};
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::port::UnregisterWanted;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// For how long a program that was answered may take to register the range.
const ANSWERED: Duration = Duration::from_secs(1);
/// A range that is not back by then stays managed, and the program is refused it.
const PATIENCE: Duration = Duration::from_secs(600);

/// How often memory is counted that memfold is kept from.
const COUNT: Duration = Duration::from_millis(250);

/// Requests that are being served.
#[derive(Default)]
pub struct Unregistering {
    /// By address space.
    requests: HashMap<u64, Request>,
    counted: Option<Instant>,
}

struct Request {
    number: u32,
    range: PageRange,
    /// What of it was managed.
    managed: RangeSet,
    next: VirtualPage,
    since: Instant,
    answered: Option<Instant>,
}

impl Unregistering {
    /// Whether mappings of this program must be left alone for the moment.
    pub fn is_pending(&self, space: &AddressSpace) -> bool {
        self.requests.get(&space.id).is_some_and(|request| {
            let is_over = |at: Instant| at.elapsed() > ANSWERED;
            !request.answered.is_some_and(is_over)
        })
    }
}

impl Governor {
    /// Serves what programs ask for; whether one waits.
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

    /// One step of serving a request; whether others are to follow.
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
            // What could not be unregistered is managed again.
            space.sampling.rescan.store(true, Ordering::Relaxed);
            space.channel.answer_unregister(request.number);
        }
        self.unregistering.requests.insert(space.id, request);
        !is_over
    }

    /// Counts what is in memory of that from which memfold is kept: it cannot go out to make room for
    /// the rest.
    pub(super) fn count_refused(&mut self, spaces: &[Arc<AddressSpace>]) {
        let counted = &mut self.unregistering.counted;
        if counted.is_some_and(|at| at.elapsed() < COUNT) {
            return;
        }
        *counted = Some(Instant::now());
        let pages = |space: &Arc<AddressSpace>| -> u64 {
            let ranges = lock(&space.refused).ranges().to_vec();
            if space.has_left() {
                return 0;
            }
            let present = ranges.iter().map(|range| space.present(*range));
            // Of a program that is gone there is nothing.
            present.flatten().map(|present| present.pages()).sum()
        };
        let refused = spaces.iter().map(pages).sum();
        self.group.refused_pages.store(refused, Ordering::Relaxed);
    }

    fn begin(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        number: u32,
    ) -> Option<Request> {
        let mut gate = space.exclusive_within(GATE_PATIENCE).ok()?;
        let messages = self.handlers.read_messages(space, &mut gate);
        let mut managed = RangeSet::default();
        let mut regions = lock(&space.managed);
        let parts = regions.covered(range);
        parts.into_iter().for_each(|part| managed.add(part));
        regions.remove(range);
        drop(regions);
        drop(gate);
        self.take_in(space, messages);
        Some(Request {
            number,
            range,
            managed,
            next: range.start,
            since: Instant::now(),
            answered: None,
        })
    }

    /// Unregisters the range if all of it is in memory.
    fn finish(&mut self, space: &Arc<AddressSpace>, request: &Request) -> bool {
        let Ok(mut gate) = space.exclusive_within(GATE_PATIENCE) else {
            return false;
        };
        let messages = self.handlers.read_messages(space, &mut gate);
        // What the helper has not begun to move is stale from now on.
        space.begin_events(&gate);
        let is_ready = !space.is_changing()
            && !is_any_out(&gate, request.range)
            && !is_unsharing(space, request.range);
        if is_ready {
            release(space, &mut gate, request);
            self.unregistering.counted = None;
        }
        drop(gate);
        self.take_in(space, messages);
        is_ready
    }
}

/// The pages of a request, which the program may have written as it likes. `None` if it is none that can
/// be served.
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

/// Whether something of a range is neither in memory nor a hole. What is on its way to the stage, the
/// batch being stale, is in memory.
fn is_any_out(gate: &Exclusive<'_>, range: PageRange) -> bool {
    let mut any = false;
    gate.table().visit(range, |_, entry| {
        any = matches!(
            entry.load(),
            PageState::Swapped(_)
                | PageState::Filling(..)
                | PageState::Staged(_)
                | PageState::Returning(_)
                | PageState::Clearing
        );
        !any
    });
    any
}

/// Whether the helper may be about to write to pages of the range, which it does outside the gate.
fn is_unsharing(space: &AddressSpace, range: PageRange) -> bool {
    let mover = lock(&space.helper_port);
    let mut runs = mover.batch.iter().flat_map(|batch| &batch.moves);
    runs.any(|run| {
        let end = run.page.plus(u64::from(run.pages));
        let start = run.page;
        run.place.is_none() && !range.intersection(PageRange { start, end }).is_empty()
    })
}

/// Lets go of a range. What the kernel may refuse to unregister counts as unmanaged all the same: its
/// faults are served as those of any page that nothing is known of.
fn release(space: &AddressSpace, gate: &mut Exclusive<'_>, request: &Request) {
    let mut ours = request.managed.clone();
    let arrived = lock(&space.managed).covered(request.range);
    arrived.into_iter().for_each(|part| ours.add(part));
    add_unmanaged(space, request.range, &mut ours);
    for part in ours.ranges() {
        let _ = space
            .uffd()
            .unregister(part.start.address(), bytes(part.pages()));
    }
    space.apply_unmap(gate, request.range);
    space.unregistered.fetch_add(1, Ordering::Relaxed);
    lock(&space.refused).note(request.range);
}

/// Adds what of a range is registered and was never counted as managed. Which that is, is told by the
/// kernel: it lets memfold register what is its own, and what is nobody's, once more.
fn add_unmanaged(space: &AddressSpace, range: PageRange, ours: &mut RangeSet) {
    let areas = space
        .attached()
        .and_then(|attached| attached.inspector.areas().ok());
    for area in areas.iter().flatten().filter(|area| area.movable) {
        let part = PageRange::of_addresses(area.start, area.end).intersection(range);
        for piece in ours.uncovered(part) {
            let (start, length) = (piece.start.address(), bytes(piece.pages()));
            if space.uffd().register_protectable(start, length).is_ok() {
                ours.add(piece);
            }
        }
    }
}
