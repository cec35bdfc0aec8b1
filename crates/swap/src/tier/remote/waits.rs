//! Waiting for a store that takes no pages now, and the end of all waits.

use std::time::Duration;

use super::{RemoteError, RemoteTier};
use crate::sync::atomic::Ordering::Relaxed;

/// The least and the longest sleep of a thread that waits for the store to take pages. Longer takes less CPU time, and
/// notices later that another thread has made room, or that waits end.
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

impl RemoteTier {
    /// For a thread that needs the room of pages which the store did not take, and has waited `so_far`: sleeps until the
    /// store may take them. Returns `false`, without a sleep, where it is not worth waiting: the tier is closed, the
    /// store is full or refuses pages, or the wait has been as long as [`RemoteConfig::patience`](super::RemoteConfig).
    pub fn wait_for_stores(&self, so_far: Duration) -> bool {
        let mut waited = Duration::ZERO;
        loop {
            let (pause, refusal) = self.health.pause(self.backend.now());
            let may_pass = !matches!(refusal, Some(RemoteError::Full | RemoteError::Refused));
            let is_patient = so_far + waited < self.config.patience;
            if self.is_closed() || !may_pass || !is_patient {
                return false;
            }
            let sleep = pause.clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
            self.backend.sleep(sleep);
            waited += sleep;
            if pause <= sleep {
                return true;
            }
        }
    }

    /// Ends all waits for the store, for good: loads from it fail from now on, as do stores. To be called before the
    /// threads that load are waited for.
    pub fn end_waits(&self) {
        self.set_closed(true);
        self.ending.store(true, Relaxed);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }
}
