//! What is done beside storing and loading: removing what was freed, renewing the rest, and the clean end.
//!
//! Renewals come before removals whenever they are due: pages that expire are lost, and what is freed can wait. Each
//! call to the backend may take seconds, so both are asked between two of them.

use std::time::Duration;

use super::{
    RemoteTier,
    backend::{BatchId, Removal},
    health::pause_before,
};
use crate::sync::{atomic::Ordering::Relaxed, lock};

/// Batches of one call to the backend. More make fewer round trips, and each takes longer.
const AT_ONCE: usize = 512;

/// After a removal that failed, `LOOKS` times `AT_ONCE` batches are looked at for those that have expired. More follow a
/// faster growing number of them.
const LOOKS: usize = 32;

/// Renewals of the time to live.
#[derive(Debug)]
pub(super) struct Renewal {
    /// When all batches are renewed next, by [`time_of_store`](super::RemoteBackend::time_of_store).
    due: Duration,
    /// Those of the last round that could not be renewed.
    failed: Vec<BatchId>,
}

impl Renewal {
    pub(super) fn new(due: Duration) -> Self {
        Self {
            due,
            failed: Vec::new(),
        }
    }
}

impl RemoteTier {
    /// Removes what was freed from the store, and renews the time to live of the rest when that is due. To be
    /// called at intervals much shorter than [`RemoteConfig::renew_every`](super::RemoteConfig::renew_every), by one
    /// thread: it waits for the store. Ends early, after a call to the store, once `is_over` says so, and after a
    /// removal that fails: a store in trouble takes long for each. Returns whether all of it was done.
    pub fn maintain(&self, is_over: &dyn Fn() -> bool) -> bool {
        let mut is_done = self.renew(is_over);
        self.ask_again();
        let mut left = lock(&self.batches).left_to_remove();
        while left > 0 {
            if is_over() {
                return false;
            }
            if self.is_renewal_due() {
                is_done &= self.renew(is_over);
            }
            let count = AT_ONCE.min(left);
            left -= count;
            if !self.remove_some(count) {
                self.forget_expired();
                return false;
            }
        }
        is_done
    }

    /// Asks for what the store did not return. Once it answers, loads ask it first again.
    fn ask_again(&self) {
        let Some(place) = self.health.not_returned() else {
            return;
        };
        let got = self.backend.get(&[place]).pop();
        if let Some(Ok(_)) = got {
            self.health.note_returned();
            self.health.end_load(None, true);
        }
    }

    /// Removes up to `count` batches, or pages of them, that were freed. Returns whether all of these are gone.
    fn remove_some(&self, count: usize) -> bool {
        let removals = lock(&self.batches).removals(count);
        let outcomes = self.backend.remove(&removals);
        let mut batches = lock(&self.batches);
        let mut failed = 0;
        for (removal, outcome) in removals.into_iter().zip(outcomes) {
            match outcome {
                Ok(()) => batches.removed(removal),
                Err(_) => {
                    failed += 1;
                    batches.not_removed(removal);
                }
            }
        }
        self.publish_bytes(&batches);
        self.counters.retries.fetch_add(failed, Relaxed);
        failed == 0
    }

    /// Forgets batches that could not be removed, once their time to live is over: a store may refuse all removals.
    fn forget_expired(&self) {
        let now = self.backend.time_of_store();
        for _ in 0..LOOKS {
            lock(&self.batches).forget_expired(AT_ONCE, now);
        }
        self.publish_bytes(&lock(&self.batches));
    }

    fn is_renewal_due(&self) -> bool {
        self.backend.time_of_store() >= lock(&self.renewal).due
    }

    /// Renews all batches if that is due, else those that could not be renewed then.
    fn renew(&self, is_over: &dyn Fn() -> bool) -> bool {
        let mut renewal = lock(&self.renewal);
        let now = self.backend.time_of_store();
        let batches = if now < renewal.due {
            std::mem::take(&mut renewal.failed)
        } else {
            renewal.due = now + self.config.renew_every;
            renewal.failed.clear();
            lock(&self.batches).in_use()
        };
        for ids in batches.chunks(AT_ONCE) {
            if is_over() {
                renewal.failed.extend(ids);
                continue;
            }
            for (&id, outcome) in ids.iter().zip(self.backend.renew(ids)) {
                match outcome {
                    Ok(true) => {}
                    Ok(false) => {
                        let lost = lock(&self.batches).note_lost(id);
                        self.counters.lost_pages.fetch_add(lost, Relaxed);
                    }
                    Err(_) => renewal.failed.push(id),
                }
            }
        }
        let failed = renewal.failed.len() as u64;
        self.counters.retries.fetch_add(failed, Relaxed);
        failed == 0
    }

    /// Removes everything from the store, at the end: no page may be loaded any more, and none is stored. What is
    /// under way to the store is waited for. Gives up after `within`; the store then forgets the rest when its
    /// time to live is over. Returns whether all was removed.
    pub fn clear(&self, within: Duration) -> bool {
        self.set_closed(true);
        let deadline = self.backend.now() + within;
        let mut all = lock(&self.batches).take_all();
        loop {
            if all.is_empty() {
                let late = lock(&self.batches).take_late();
                let Some(late) = late else {
                    return true;
                };
                all = late;
            }
            if self.backend.now() >= deadline {
                return false;
            }
            let is_waiting = all.is_empty();
            let left = self.remove_last(&mut all);
            if left || is_waiting {
                self.backend.sleep(pause_before(4));
            }
        }
    }

    /// Removes the last of `all`, and keeps those that could not be removed. Returns whether there are any.
    fn remove_last(&self, all: &mut Vec<Removal>) -> bool {
        let now = all.split_off(all.len().saturating_sub(AT_ONCE));
        if now.is_empty() {
            return false;
        }
        let before = all.len();
        let outcomes = now.iter().zip(self.backend.remove(&now));
        all.extend(outcomes.filter_map(|(removal, outcome)| outcome.is_err().then_some(*removal)));
        all.len() > before
    }
}
