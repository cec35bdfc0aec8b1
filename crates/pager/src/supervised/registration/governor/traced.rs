//! Programs that a tracer holds.
//!
//! A tracer reads memory by `/proc/PID/mem` or `PTRACE_PEEKDATA`. There the kernel does not wait for a
//! userfaultfd: a page that is out cannot be read (`EIO`). So what is out of a program comes back once a
//! tracer has its main thread stopped for longer than a moment, as a debugger does, and stays as long as
//! that does. One that lets the program go on at once (`strace`) changes nothing.

use super::Governor;
use super::recall::SLICE;
use crate::page::{PageRange, VirtualPage};
use crate::page_table::PageTable;
use crate::supervised::reclaim::batch::Batch;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often it is looked for tracers.
const LOOK: Duration = Duration::from_millis(10);
/// How long a program is stopped before its memory is brought back.
const MOMENT: Duration = Duration::from_millis(15);
/// The same where the tracer is under the same limit: it may wait for a page of its own.
const MOMENT_OF_OWN_TRACER: Duration = Duration::from_millis(500);

/// What is known of programs that are stopped, by address space.
pub struct Tracing {
    stops: HashMap<u64, Stop>,
    looked: Instant,
}

impl Default for Tracing {
    fn default() -> Self {
        Tracing {
            stops: HashMap::new(),
            looked: Instant::now(),
        }
    }
}

/// One stop, as long as the program does not run in between.
struct Stop {
    switches: u64,
    since: Instant,
    moment: Duration,
    /// Pages brought back.
    pages: u64,
    /// Where to go on; `None` when all is back.
    next: Option<VirtualPage>,
    /// A pass left something out.
    is_incomplete: bool,
    was_said: bool,
}

impl Governor {
    /// Brings back the memory of programs that tracers hold; whether there is more to be brought.
    pub(super) fn recall_for_tracers(&mut self, spaces: &[Arc<AddressSpace>]) -> bool {
        if self.tracing.looked.elapsed() >= LOOK {
            self.tracing.looked = Instant::now();
            self.look_for_tracers(spaces);
        }
        let mut more = false;
        for space in spaces.iter().filter(|space| space.is_held()) {
            if let Some(mut stop) = self.tracing.stops.remove(&space.id) {
                more |= self.recall_for_tracer(space, &mut stop);
                self.tracing.stops.insert(space.id, stop);
            }
        }
        more
    }

    fn look_for_tracers(&mut self, spaces: &[Arc<AddressSpace>]) {
        let mut stops = std::mem::take(&mut self.tracing.stops);
        for space in spaces {
            let known = stops.remove(&space.id);
            if space.has_left() || lock(&space.managed).ranges().is_empty() {
                self.let_go(space, known);
                continue;
            }
            let stopped = space
                .inspector()
                .and_then(|inspector| inspector.trace_stop());
            let stop = match (stopped, known) {
                (None, known) => {
                    self.let_go(space, known);
                    continue;
                }
                (Some(stopped), Some(known)) if known.switches == stopped.switches => known,
                (Some(stopped), known) => {
                    self.let_go(space, known);
                    let is_own = spaces.iter().any(|space| {
                        let pid = space.inspector().map(|inspector| inspector.pid());
                        pid == Some(stopped.tracer)
                    });
                    Stop {
                        switches: stopped.switches,
                        since: Instant::now(),
                        moment: if is_own { MOMENT_OF_OWN_TRACER } else { MOMENT },
                        pages: 0,
                        next: Some(VirtualPage(0)),
                        is_incomplete: false,
                        was_said: false,
                    }
                }
            };
            if stop.since.elapsed() >= stop.moment {
                space.stop.held.store(true, Ordering::Relaxed);
            }
            self.tracing.stops.insert(space.id, stop);
        }
        // Of programs that are gone.
        stops.into_values().for_each(|stop| self.forget(&stop));
    }

    fn let_go(&self, space: &AddressSpace, stop: Option<Stop>) {
        space.stop.held.store(false, Ordering::Relaxed);
        if let Some(stop) = stop {
            self.forget(&stop);
        }
    }

    fn forget(&self, stop: &Stop) {
        let held = &self.group.held_pages;
        held.fetch_sub(stop.pages, Ordering::Relaxed);
    }

    /// One step; whether others are to follow.
    fn recall_for_tracer(&mut self, space: &Arc<AddressSpace>, stop: &mut Stop) -> bool {
        let Some(start) = stop.next else {
            // What a command had begun to move is known once the helper went on.
            if stop.is_incomplete && !is_moving(space) {
                stop.next = Some(VirtualPage(0));
                stop.is_incomplete = false;
            }
            return false;
        };
        let whole = PageTable::everything();
        let rest = PageRange { start, ..whole };
        let (group, held) = (self.group.clone(), Cell::new(stop.pages));
        let recalled = self.recall(space, rest, Instant::now() + SLICE, |pages| {
            held.set(held.get() + pages);
            group.held_pages.fetch_add(pages, Ordering::Relaxed);
        });
        stop.pages = held.get();
        stop.is_incomplete |= recalled.is_incomplete;
        stop.next = recalled.next;
        if stop.next.is_some() {
            return true;
        }
        let was_moving = is_moving(space);
        if was_moving && space.take_over_gate() {
            // What it had moved is staged.
            stop.next = Some(VirtualPage(0));
            return true;
        }
        stop.is_incomplete |= was_moving;
        if stop.pages > 0 && !stop.was_said {
            stop.was_said = true;
            let pid = space.inspector().map_or(0, |inspector| inspector.pid());
            self.group.note_held(pid, stop.pages);
        }
        false
    }
}

/// Whether a command is with the helper.
fn is_moving(space: &AddressSpace) -> bool {
    if let Ok(gate) = space.shared() {
        Batch::settle(space, &gate);
    }
    lock(&space.helper_port).batch.is_some()
}
