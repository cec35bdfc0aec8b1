//! The threads that bring in and send pages on other machines.

use super::engine_state::EngineState;
use super::fault::Cause;
use super::remote_queue::THREADS;
use super::stats::count;
use super::worker;
use crate::sync::lock;
use memfold_swap::{Scratch, Slot};
use memfold_sys::PAGE_SIZE;
use memfold_sys::owned_uffd::borrow;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Between two looks at the pool's size. Longer lets the pool grow by more beyond its share.
const INTERVAL: Duration = Duration::from_millis(20);
/// Bytes that are sent at once. More makes fewer, longer calls.
const AT_ONCE: u64 = 1 << 20;
/// After a failure nothing is sent for as long.
const REST: Duration = Duration::from_millis(100);

impl EngineState {
    /// Whether the page in a slot is on other machines.
    pub(super) fn is_remote(&self, slot: Slot) -> bool {
        self.remote.is_some() && self.space.may_wait(slot)
    }

    /// Brings pages in from the store until the engine stops.
    pub(super) fn remote_thread(&self) {
        let Some(remote) = &self.remote else { return };
        let number = remote.taken.fetch_add(1, Ordering::Relaxed) as usize;
        let queue = &remote.queues[number % THREADS];
        while !self.is_stopping() {
            // It stays in the queue until it is done, so that it is not queued again.
            let first = lock(&queue.waiting).front().cloned();
            let Some((area, span)) = first else {
                queue.event.wait(Duration::from_secs(1));
                continue;
            };
            {
                let mut worker = worker::take();
                if let Some(_mapped) = area.mapped() {
                    let brought = self.swap_in(&area, span, Cause::Remote, &mut worker);
                    let faults = u64::from(brought > 0);
                    count(&self.counters.faults_swap_in, faults);
                    count(&self.counters.remote_faults, faults);
                }
            }
            lock(&queue.waiting).pop_front();
            if let Some(uffd) = &self.uffd {
                // Whatever became of the page, who waits for it looks again.
                let page = span.address as u64;
                let _ = borrow(uffd).wake(page, PAGE_SIZE as u64);
            }
        }
        // The areas hold the engine.
        lock(&queue.waiting).clear();
    }

    /// Sends what does not fit into half of the limit, oldest first, until the engine stops.
    pub(super) fn send_thread(&self) {
        let limit = self.account.limit().total_bytes.unwrap_or(u64::MAX);
        let (start, stop) = (limit / 2 - limit / 64, limit / 2 - limit / 32);
        let mut scratch = Scratch::new();
        while !self.is_stopping() {
            std::thread::park_timeout(INTERVAL);
            if self.space.pool_bytes() <= start {
                continue;
            }
            while !self.is_stopping() {
                let excess = self.space.pool_bytes().saturating_sub(stop);
                if excess == 0 {
                    break;
                }
                let report = self.space.write_back(excess.min(AT_ONCE), &mut scratch);
                // The memory is free once its zspages are, and the limit is for what is left.
                self.space.trim_spare();
                self.refresh_account();
                if report.moved == 0 {
                    std::thread::park_timeout(REST);
                    break;
                }
            }
        }
    }
}
