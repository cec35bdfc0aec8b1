//! Programs held by a tracer.
//!
//! A tracer reads memory by `/proc/PID/mem` or `PTRACE_PEEKDATA`, for which the kernel does not wait
//! for a userfaultfd: reading a page that is out fails with EIO. So if a tracer keeps the main thread
//! stopped for some time, as a debugger does, all pages are brought back and stay until the program
//! continues. A tracer that continues the program at once (`strace`) has no such effect.

use super::recall::SLICE;
use super::{GATE_PATIENCE, Governor};
use crate::page::{PageRange, VirtualPage};
use crate::page_table::PageTable;
use crate::supervised::reclaim::batch::Batch;
use crate::supervised::registration::register::protect_zeros_again;
use crate::supervised::space::AddressSpace;
use crate::supervised::util::pace::Pace;
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::thread;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Interval of checks for tracers; longer where there are many programs ([`Pace`]), for those that were not found stopped
/// at the last check. Longer costs less and delays the recall.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Checks take one part of a CPU in so many at most. A larger value costs less where there are many programs.
const CHECK_REST: u32 = 400;
/// Duration of a stop after which memory is brought back. Longer spares short stops, and makes a
/// debugger's early reads fail.
const HELD_AFTER: Duration = Duration::from_millis(15);
/// The same if the tracer is under the same limit, and so may be waiting for a page of its own.
const HELD_AFTER_BY_MANAGED_TRACER: Duration = Duration::from_millis(500);

/// The stops of traced programs. The governor owns it.
pub(super) struct Tracing {
    /// By ID of the address space.
    stops: HashMap<u64, Stop>,
    /// Time of the last check.
    checked: Instant,
    /// When all programs are checked.
    pace: Pace,
}

impl Default for Tracing {
    fn default() -> Self {
        Tracing {
            stops: HashMap::new(),
            checked: Instant::now(),
            pace: Pace::new(CHECK_INTERVAL, CHECK_REST),
        }
    }
}

impl Tracing {
    /// Whether a program was found stopped by a tracer.
    pub(super) fn is_any_stopped(&self) -> bool {
        !self.stops.is_empty()
    }
}

/// One stop, during which the program does not run.
struct Stop {
    /// Context switches of the main thread, which tell two stops apart.
    switches: u64,
    since: Instant,
    /// Duration from which the program counts as held.
    held_after: Duration,
    /// [`StopState::pages_in`](crate::supervised::space::stopped::StopState) at its beginning.
    pages_in_before: u64,
    /// Pages that came back since, as far as they are counted.
    pages: u64,
    /// Where to continue; `None` when all pages are back.
    next: Option<VirtualPage>,
    /// A pass skipped some pages.
    is_incomplete: bool,
    was_reported: bool,
}

impl Governor {
    /// Brings back the memory of programs that tracers hold. Returns whether more is left.
    pub(super) fn recall_for_tracers(&mut self, spaces: &[Arc<AddressSpace>]) -> bool {
        if self.tracing.checked.elapsed() >= CHECK_INTERVAL {
            self.tracing.checked = Instant::now();
            if self.tracing.pace.is_due(spaces.len()) {
                let ((), took) = thread::cpu_time_of(|| self.check_tracers(spaces));
                self.tracing.pace.note(spaces.len(), took);
            } else if !self.tracing.stops.is_empty() {
                let mut stopped = spaces.to_vec();
                stopped.retain(|space| self.tracing.stops.contains_key(&space.id));
                self.check_tracers(&stopped);
            }
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

    /// Checks these programs, among them all that were found stopped.
    fn check_tracers(&mut self, spaces: &[Arc<AddressSpace>]) {
        let mut stops = std::mem::take(&mut self.tracing.stops);
        for space in spaces {
            let known = stops.remove(&space.id);
            if space.has_left() || lock(&space.managed).ranges().is_empty() {
                self.end_stop(space, known);
                continue;
            }
            let stopped = space
                .inspector()
                .and_then(|inspector| inspector.trace_stop());
            let stop = match (stopped, known) {
                (None, known) => {
                    self.end_stop(space, known);
                    continue;
                }
                (Some(stopped), Some(known)) if known.switches == stopped.switches => known,
                (Some(stopped), known) => {
                    self.end_stop(space, known);
                    let is_managed = self.group.spaces().iter().any(|space| {
                        let pid = space.inspector().map(|inspector| inspector.pid());
                        pid == Some(stopped.tracer)
                    });
                    Stop {
                        switches: stopped.switches,
                        since: Instant::now(),
                        held_after: if is_managed {
                            HELD_AFTER_BY_MANAGED_TRACER
                        } else {
                            HELD_AFTER
                        },
                        pages_in_before: space.stop.pages_in.load(Ordering::Relaxed),
                        pages: 0,
                        next: Some(VirtualPage(0)),
                        is_incomplete: false,
                        was_reported: false,
                    }
                }
            };
            if stop.since.elapsed() >= stop.held_after {
                space.stop.held.store(true, Ordering::Relaxed);
                space.unprotect_managed();
            }
            self.tracing.stops.insert(space.id, stop);
        }
        // The remaining stops are of programs that are gone.
        stops.into_values().for_each(|stop| self.uncount(&stop));
    }

    /// Ends a stop: the program may be paged out again.
    fn end_stop(&self, space: &AddressSpace, stop: Option<Stop>) {
        if space.stop.held.swap(false, Ordering::Relaxed) {
            protect_zeros_again(space);
        }
        if let Some(stop) = stop {
            self.uncount(&stop);
        }
    }

    /// Takes the pages of a stop off the allowance above the limit.
    fn uncount(&self, stop: &Stop) {
        let held = &self.group.held_pages;
        held.fetch_sub(stop.pages, Ordering::Relaxed);
    }

    /// Adds the pages that came back since the last time to the allowance above the limit, whichever thread brought them
    /// in: they stay as long as the stop lasts.
    fn count(&self, space: &AddressSpace, stop: &mut Stop) {
        let pages_in = space.stop.pages_in.load(Ordering::Relaxed);
        let pages = pages_in - stop.pages_in_before;
        let held = &self.group.held_pages;
        held.fetch_add(pages - stop.pages, Ordering::Relaxed);
        stop.pages = pages;
    }

    /// One slice of a recall. Returns whether more is left.
    fn recall_for_tracer(&mut self, space: &Arc<AddressSpace>, stop: &mut Stop) -> bool {
        self.count(space, stop);
        let Some(start) = stop.next else {
            // Pages of a batch in flight are recalled once the batch is settled. If the helper is in the gate, a takeover
            // settles it, and fails until the helper is stopped.
            if stop.is_incomplete && (!is_moving(space) || space.take_over_gate()) {
                stop.next = Some(VirtualPage(0));
                stop.is_incomplete = false;
            }
            return false;
        };
        let whole = PageTable::everything();
        let rest = PageRange { start, ..whole };
        let recalled = self.recall(space, rest, Instant::now() + SLICE);
        self.count(space, stop);
        stop.is_incomplete |= recalled.is_incomplete;
        stop.next = recalled.next;
        if stop.next.is_some() {
            return true;
        }
        if stop.pages > 0 && !stop.was_reported {
            stop.was_reported = true;
            let pid = space.inspector().map_or(0, |inspector| inspector.pid());
            self.group.note_held(pid, stop.pages);
        }
        false
    }
}

/// Whether a batch is in flight.
fn is_moving(space: &AddressSpace) -> bool {
    if let Ok(gate) = space.shared_within(GATE_PATIENCE) {
        Batch::settle(space, &gate);
    }
    lock(&space.helper_port).batch.is_some()
}
