//! Readahead: a thread that goes on ahead of the streams that faults have shown.
//!
//! A steady stream is read ahead in spans of 64 pages, each but for its first page. That page is
//! the **marker**: when the program touches it, its fault brings in this page alone and has the span
//! behind this one read. So a fault a span is all that a stream costs the program as long as the
//! readahead keeps up, and the program's own speed, not a clock, drives it. A program that is
//! faster finds pages missing, and brings them in by its own faults meanwhile, on its own CPU.

use super::area::Area;
use super::bell::Bell;
use super::engine::{Shared, lock};
use super::fault::Cause;
use super::stats::count;
use super::streams::Advice;
use super::worker;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Pages brought in between two looks at whether they are still wanted.
const STEP: u32 = 16;
/// More spans than this are not kept: their streams are faster than we are.
const WAITING: usize = 16;
/// How long the thread stays awake for more. To wake it costs the one who faults several
/// microseconds.
const LINGER: Duration = Duration::from_micros(200);

/// What is to be read ahead.
pub struct Readahead {
    /// Whether there is, or soon will be, a thread for it.
    enabled: bool,
    spans: Mutex<VecDeque<(Arc<Area>, Advice)>>,
    busy: AtomicBool,
    pub bell: Bell,
}

impl Readahead {
    pub fn new(enabled: bool) -> Readahead {
        Readahead {
            enabled,
            spans: Mutex::default(),
            busy: AtomicBool::new(false),
            bell: Bell::default(),
        }
    }

    /// Whether pages may be brought in that nobody asked for.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Asks for a span. Never waits. Returns whether it was heard.
    pub fn ask(&self, area: &Arc<Area>, span: Advice) -> bool {
        let Ok(mut spans) = self.spans.try_lock() else {
            return false;
        };
        if spans.capacity() < WAITING {
            // In a signal handler nothing is allocated: there is no thread, or not yet.
            return false;
        }
        if spans.len() == WAITING {
            spans.pop_front();
        }
        spans.push_back((area.clone(), span));
        drop(spans);
        if !self.busy.load(Ordering::Relaxed) {
            self.bell.ring();
        }
        true
    }

    fn take(&self) -> Option<(Arc<Area>, Advice)> {
        lock(&self.spans).pop_front()
    }
}

impl Shared {
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
                // Whoever else wants this CPU may have it.
                std::thread::yield_now();
            } else {
                self.readahead.busy.store(false, Ordering::SeqCst);
                if lock(&self.readahead.spans).is_empty() {
                    self.readahead.bell.sleep(Duration::from_secs(1));
                }
            }
        }
        // They hold their areas, which hold the engine.
        lock(&self.readahead.spans).clear();
    }

    fn read_span(&self, area: &Arc<Area>, span: Advice) {
        let mut rest = span;
        while rest.count > 0 && !self.is_stopping() {
            let step = rest.first(STEP);
            rest = step.behind(rest.count - step.count);
            // Before the gate, as everywhere: who waits for a gate may have the last worker.
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
