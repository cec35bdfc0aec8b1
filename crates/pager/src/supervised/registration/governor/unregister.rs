//! Memory that a program registers with a userfaultfd of its own.
//!
//! A VMA can be registered with one userfaultfd only. If memfold has registered it, the preload library
//! requests the range on behalf of the program (`ioctl.rs` of the agent), and retries once the request
//! is answered:
//!
//! 1. The range becomes unmanaged, so that no more victims are taken from it.
//! 2. Pages that are out are brought back, in slices.
//! 3. Under the exclusive gate, with no change in progress (`waiting.rs`), the range is unregistered. Batches planned
//!    before are stale; faults read before are not served any more.
//! 4. Until the program has registered the range, none of its mappings are registered. From then on the
//!    kernel refuses to register the range (`refused.rs`).

use super::Governor;
use super::recall::SLICE;
use super::request::{Outcome, Request, begin_patiently, finish_patiently};
use super::waiting::Progress;
use crate::page::PageRange;
use crate::page_table::PageTable;
use crate::supervised::space::AddressSpace;
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

/// Interval at which resident pages of refused ranges are counted. Longer costs less and adjusts the
/// limit later.
const COUNT_INTERVAL: Duration = Duration::from_millis(250);

/// Requests in progress. The governor owns it.
#[derive(Default)]
pub(super) struct Unregistering {
    /// By ID of the address space.
    requests: HashMap<u64, Request>,
    /// Time of the last count of refused pages.
    counted: Option<Instant>,
}

impl Unregistering {
    /// Whether mappings of this program must not be registered for the moment.
    pub(super) fn is_pending(&self, space: &AddressSpace) -> bool {
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
        self.waiting.forget(|id| gone(&id));
        let mut is_awaited = false;
        for space in spaces {
            let Some(wanted) = space.channel.unregister_wanted() else {
                let request = self.unregistering.requests.remove(&space.id);
                if request.is_some_and(|request| request.answered.is_none()) {
                    // The program has given it up: what was unregistered is registered again.
                    space.sampling.rescan.store(true, Ordering::Relaxed);
                }
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
        if self.waiting.is_under_way(space.id) {
            return true;
        }
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

    /// Begins a request, or notes that the program must be waited for.
    pub(super) fn begin(
        &mut self,
        space: &Arc<AddressSpace>,
        range: PageRange,
        number: u32,
    ) -> Option<Request> {
        match self.waiting.take(space.id) {
            Progress::Waits => return None,
            Progress::Done(Outcome::Begun(Some(request))) => {
                if request.number == number && request.range == range {
                    return Some(request);
                }
                // The program asks for something else by now: the range becomes managed again.
                space.sampling.rescan.store(true, Ordering::Relaxed);
            }
            Progress::Done(_) | Progress::None => {}
        }
        let begun = self.messages.begin(space, range, number);
        if begun.is_some() {
            self.waiting.note_success(space.id);
        } else {
            let handlers = self.handlers.clone();
            let step = || begin_patiently(handlers, space.clone(), range, number);
            self.waiting.note_miss(space.id, step);
        }
        begun
    }

    /// Unregisters the range if no page of it is out, or notes that the program must be waited for.
    pub(super) fn finish(&mut self, space: &Arc<AddressSpace>, request: &Request) -> bool {
        let finished = match self.waiting.take(space.id) {
            Progress::Waits => return false,
            Progress::Done(Outcome::Finished(range, true)) if range == request.range => Some(true),
            Progress::Done(_) | Progress::None => self.messages.finish(space, request),
        };
        if finished.is_some() {
            self.waiting.note_success(space.id);
        } else {
            let handlers = self.handlers.clone();
            let step = || finish_patiently(handlers, space.clone(), request.clone());
            self.waiting.note_miss(space.id, step);
        }
        if finished == Some(true) {
            self.unregistering.counted = None;
        }
        finished == Some(true)
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
