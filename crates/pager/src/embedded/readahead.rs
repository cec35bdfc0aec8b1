//! Readahead: a thread that swaps in pages ahead of the streams that faults have shown.
//!
//! A steady stream is read ahead in spans of 64 pages, except for the first page of each. That page is
//! the **marker** (as `PG_readahead`): its fault swaps in this page alone, and asks for the next span. So a
//! stream costs the program one fault a span as long as the thread keeps up, and the program's speed sets
//! the pace. A program that is faster faults on missing pages, and swaps them in on its own CPU.

use super::area::Area;
use super::engine_state::EngineState;
use super::fault::Cause;
use super::span_queue::WAITING;
use super::stats::count;
use super::streams::Advice;
use super::worker;
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pages that are swapped in at a time, between looks at the room and whether the engine stops. More
/// makes fewer looks.
const STEP: u32 = 16;
/// How long the thread polls for another span before it sleeps. More takes more CPU time, and spares the
/// faulting thread the wake-up.
const LINGER: Duration = Duration::from_micros(200);

impl EngineState {
    /// Reads ahead until the engine is dropped.
    pub(super) fn readahead_thread(&self) {
        lock(&self.readahead.spans).reserve(WAITING);
        let mut idle_since = Instant::now();
        while !self.is_stopping() {
            if let Some((area, span)) = self.readahead.take() {
                self.readahead.busy.store(true, Ordering::Relaxed);
                self.read_span(&area, span);
                idle_since = Instant::now();
            } else if idle_since.elapsed() < LINGER {
                // Another thread may need this CPU.
                std::thread::yield_now();
            } else {
                self.readahead.busy.store(false, Ordering::SeqCst);
                if lock(&self.readahead.spans).is_empty() {
                    self.readahead.event.wait(Duration::from_secs(1));
                }
            }
        }
        // The spans hold their areas, which hold the engine.
        lock(&self.readahead.spans).clear();
    }

    fn read_span(&self, area: &Arc<Area>, span: Advice) {
        let mut rest = span;
        while rest.count > 0 && !self.is_stopping() {
            let step = rest.first(STEP);
            rest = step.behind(rest.count - step.count);
            // The worker before the gate, as everywhere: a thread that waits for a gate may hold the last
            // worker.
            let mut worker = worker::take();
            let Some(_mapped) = area.mapped() else {
                return;
            };
            if !self.account.has_spare(u64::from(step.count)) {
                return;
            }
            let brought = self.swap_in(area, step, Cause::Advice, &mut worker);
            count(&self.counters.pages_read_ahead, brought as u64);
        }
    }
}
