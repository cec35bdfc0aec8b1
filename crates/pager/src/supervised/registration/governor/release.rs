//! Programs that are managed no more: those that a user detaches, and those with seccomp filters of their own that fork
//! where forks are prepared.
//!
//! All pages of such a program are brought back, range by range, and unregistered, and its helper gives its memory to
//! children again.
//!
//! - Neither a program with filters nor its child may make system calls for memfold. Before it forks, a thread asks by a
//!   touch of the beacon (`fork/prepared.rs`), and is answered then.
//! - The helper of a detached program ends then. Once its socket has closed, the address space is forgotten, and
//!   with it the last copies of the userfaultfd are closed. A forked child that has no helper is forgotten at once.

use super::recall::SLICE;
use super::request::{Outcome, Request, look_patiently};
use super::waiting::Progress;
use super::{GATE_PATIENCE, Governor};
use crate::page::PageRange;
use crate::page_table::PageTable;
use crate::supervised::fork::prepared::answer_with;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::channel::DENIED;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ranges on their way back, by ID of the address space. The governor owns it.
#[derive(Default)]
pub(super) struct Releasing(HashMap<u64, Request>);

impl Governor {
    /// Goes on with all programs that are to be managed no more. Returns whether one waits.
    pub(super) fn release_programs(&mut self, spaces: &[Arc<AddressSpace>]) -> bool {
        let wants = |space: &&Arc<AddressSpace>| {
            let asks = space.prepared.releases.load(Ordering::Relaxed);
            (asks || space.let_go.is_asked()) && !space.is_dead()
        };
        let mut is_awaited = false;
        for space in spaces.iter().filter(wants) {
            is_awaited |= !self.release(space);
        }
        if !is_awaited {
            self.releasing.0.clear();
        }
        is_awaited
    }

    /// A slice. Returns whether the program was answered.
    fn release(&mut self, space: &Arc<AddressSpace>) -> bool {
        space.prepared.released.store(true, Ordering::Relaxed);
        let is_over = space.let_go.has_ended_helper() && space.is_detached();
        if space.has_left() || is_over {
            // A program that ended is found gone elsewhere: another process may use its memory still.
            if is_over {
                self.handlers.forget(space);
                self.group.dismiss(space);
            }
            return true;
        }
        if space.fork.awaits_comparison.load(Ordering::Relaxed) {
            // A forked child: at its first fault it is compared, and none of its pages can come back before. Where nothing
            // of it is out or lost, it may never have one.
            if !space.fork.depends_on_supervisor() {
                self.forget_without_helper(space);
            }
            return true;
        }
        if self.waiting.is_under_way(space.id) {
            return false;
        }
        let deadline = Instant::now() + SLICE;
        while Instant::now() < deadline {
            let known = self.releasing.0.remove(&space.id);
            let next = || lock(&space.managed).ranges().first().copied();
            let request = match (known, next()) {
                (Some(request), _) => request,
                (None, None) if !self.brings_all_back(space, deadline) => return false,
                (None, None) if space.let_go.is_asked() => return self.end_helper(space),
                (None, None) => return self.answer_released(space),
                (None, Some(range)) => match self.begin(space, range, 0) {
                    Some(request) => request,
                    None => return false,
                },
            };
            let Some(request) = self.release_range(space, request, deadline) else {
                continue;
            };
            self.releasing.0.insert(space.id, request);
            return false;
        }
        false
    }

    /// Returns the request if more is to be done for it.
    fn release_range(
        &mut self,
        space: &Arc<AddressSpace>,
        mut request: Request,
        deadline: Instant,
    ) -> Option<Request> {
        let start = request.next;
        let rest = PageRange {
            start,
            ..request.range
        };
        let recalled = self.recall(space, rest, deadline);
        request.next = recalled.next.unwrap_or(request.range.start);
        let is_done = recalled.next.is_none() && self.finish(space, &request);
        (!is_done).then_some(request)
    }

    /// Brings back what is out elsewhere than in a managed range: what the program has moved meanwhile. Returns whether
    /// nothing is out any more.
    fn brings_all_back(&mut self, space: &Arc<AddressSpace>, deadline: Instant) -> bool {
        let is_back = match self.waiting.take(space.id) {
            Progress::Waits => return false,
            Progress::Done(Outcome::AllBack(true)) => Some(true),
            Progress::Done(_) | Progress::None => self.messages.is_all_back(space),
        };
        match is_back {
            Some(true) => self.waiting.note_success(space.id),
            Some(false) => {
                let everything = PageTable::everything();
                self.recall(space, everything, deadline);
            }
            None => {
                let handlers = self.handlers.clone();
                let step = || look_patiently(handlers, space.clone());
                self.waiting.note_miss(space.id, step);
            }
        }
        is_back == Some(true)
    }

    /// Nothing of a detached program is out any more. Returns whether it is forgotten at once, as it has no helper.
    fn end_helper(&mut self, space: &Arc<AddressSpace>) -> bool {
        if space.attached().is_none() {
            return self.forget_without_helper(space);
        }
        if gives_all(space) {
            space.let_go.end_helper();
            space.channel.release_helper();
        } else {
            self.read_events(space);
        }
        false
    }

    /// Forgets a forked child that has no helper, unless one is being let in just now: who takes the channel's
    /// descriptor decides that.
    fn forget_without_helper(&mut self, space: &Arc<AddressSpace>) -> bool {
        let no_helper_comes = lock(&space.helper_port).take_file().is_some();
        if no_helper_comes {
            self.handlers.forget(space);
            self.group.dismiss(space);
        }
        no_helper_comes
    }

    fn answer_released(&mut self, space: &Arc<AddressSpace>) -> bool {
        let Some(attached) = space.attached() else {
            return true;
        };
        let is_answered =
            gives_all(space) && answer_with(space, attached.arena.beacon, DENIED).is_ok();
        if is_answered {
            space.prepared.releases.store(false, Ordering::Relaxed);
            let pid = attached.inspector.pid();
            log::warn!(
                "process {pid} filters its own system calls (seccomp) and forks: its memory is managed no more and may \
                 exceed the limit; with CAP_SYS_PTRACE memfold follows such forks"
            );
        } else {
            // Its mappings change.
            self.read_events(space);
        }
        is_answered
    }
}

/// Whether the helper has given all memory to children again. Without a helper nothing can be given: the child lacks it,
/// and ends.
fn gives_all(space: &AddressSpace) -> bool {
    if !space.resources.prepares_forks() || space.is_detached() {
        return true;
    }
    let Ok(spans) = space.withheld_spans(&mut None) else {
        // The program is gone.
        return true;
    };
    let began = Instant::now();
    spans.iter().all(|(start, end)| {
        let in_time = began.elapsed() < SLICE;
        in_time
            && space
                .channel
                .give(*start, end - start, GATE_PATIENCE)
                .is_ok()
    })
}
