//! The spans that wait to be read ahead.

use super::area::Area;
use super::event::Event;
use super::streams::Advice;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Spans that wait, at most: the oldest is dropped for a new one. More delays a span behind streams that
/// are faster than readahead.
pub(super) const WAITING: usize = 16;

/// The spans to be read ahead.
pub(super) struct Readahead {
    /// Whether the readahead thread is or will be started.
    enabled: bool,
    pub(super) spans: Mutex<VecDeque<(Arc<Area>, Advice)>>,
    pub(super) busy: AtomicBool,
    pub event: Event,
}

impl Readahead {
    pub(super) fn new(enabled: bool) -> Readahead {
        Readahead {
            enabled,
            spans: Mutex::default(),
            busy: AtomicBool::new(false),
            event: Event::default(),
        }
    }

    /// Whether pages may be swapped in that no thread faulted on.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Queues a span, unless another thread holds the queue. Never waits. Returns whether it was queued.
    pub(super) fn ask(&self, area: &Arc<Area>, span: Advice) -> bool {
        let Ok(mut spans) = self.spans.try_lock() else {
            return false;
        };
        if spans.capacity() < WAITING {
            // The thread has not reserved the queue yet, and a signal handler must not allocate.
            return false;
        }
        if spans.len() == WAITING {
            spans.pop_front();
        }
        spans.push_back((area.clone(), span));
        drop(spans);
        if !self.busy.load(Ordering::Relaxed) {
            self.event.set();
        }
        true
    }

    pub(super) fn take(&self) -> Option<(Arc<Area>, Advice)> {
        lock(&self.spans).pop_front()
    }
}
