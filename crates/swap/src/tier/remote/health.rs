//! What is known of the store's health: pauses after failed stores, and loads that wait.

use std::time::Duration;

use crate::{
    sync::{Mutex, lock},
    tier::remote::backend::{Place, RemoteError},
};

/// Pauses of stores after the first failure, and the longest. Longer spares a store in trouble, and
/// uses it later once it is well.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pauses of a load between two tries.
const FIRST_RETRY: Duration = Duration::from_millis(2);
const LONGEST_RETRY: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct State {
    /// Failed stores in a row.
    failures: u32,
    paused_until: Duration,
    /// Why the last of them failed.
    refusal: Option<RemoteError>,
    /// Since when each load that waits for the store does.
    waits: Vec<Duration>,
    last: Option<RemoteError>,
    /// What the store did not return, and a copy did: copies are read first until the store returns it.
    not_returned: Option<Place>,
}

/// The store's health, by what it last did.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<State>);

impl Health {
    /// Whether stores are refused for now, and why.
    pub(super) fn is_paused(&self, now: Duration) -> Option<RemoteError> {
        let state = lock(&self.0);
        if now < state.paused_until {
            state.refusal
        } else {
            None
        }
    }

    /// Notes the outcomes of the batches of one call. The call is one try, which succeeds if any batch is stored: its
    /// batches fail together, and servers that take theirs are not to wait for one that does not.
    pub(super) fn note_store(&self, outcomes: &[Result<(), RemoteError>], now: Duration) {
        let Some(last) = outcomes.last() else {
            return;
        };
        let outcome = outcomes.iter().find(|one| one.is_ok()).unwrap_or(last);
        let mut state = lock(&self.0);
        match *outcome {
            Ok(()) => {
                state.failures = 0;
                state.paused_until = Duration::ZERO;
                state.refusal = None;
                if state.waits.is_empty() {
                    state.last = None;
                }
            }
            Err(error) => {
                let pause = FIRST_PAUSE * 2_u32.saturating_pow(state.failures.min(16));
                state.failures += 1;
                state.paused_until = now + pause.min(LONGEST_PAUSE);
                state.refusal = Some(error);
                state.last = Some(error);
            }
        }
    }

    /// What is left of the pause of stores, and why the last store failed.
    pub(super) fn pause(&self, now: Duration) -> (Duration, Option<RemoteError>) {
        let state = lock(&self.0);
        (state.paused_until.saturating_sub(now), state.refusal)
    }

    /// Notes that a load waits since `since`.
    pub(super) fn begin_wait(&self, error: RemoteError, since: Duration) {
        let mut state = lock(&self.0);
        state.waits.push(since);
        state.last = Some(error);
    }

    /// Notes that a load ends, which waited since `waited` if at all. Once the store answers, and no other load waits,
    /// there is no trouble but that of stores.
    pub(super) fn end_load(&self, waited: Option<Duration>, is_answered: bool) {
        let mut state = lock(&self.0);
        if let Some(since) = waited
            && let Some(index) = state.waits.iter().position(|one| *one == since)
        {
            state.waits.swap_remove(index);
        }
        if is_answered && state.waits.is_empty() {
            state.last = state.refusal;
        }
    }

    /// Notes that a copy was read in place of what the store did not return.
    pub(super) fn note_not_returned(&self, place: Place) {
        lock(&self.0).not_returned.get_or_insert(place);
    }

    /// Notes that the store returns what it did not.
    pub(super) fn note_returned(&self) {
        lock(&self.0).not_returned = None;
    }

    /// What the store did not return when it was last asked.
    pub(super) fn not_returned(&self) -> Option<Place> {
        lock(&self.0).not_returned
    }

    /// Loads that wait, for how long, and the last error.
    pub(super) fn waiting(&self, now: Duration) -> (u64, Duration, Option<RemoteError>) {
        let state = lock(&self.0);
        let first = state.waits.iter().min().copied().unwrap_or(now);
        let count = state.waits.len() as u64;
        (count, now.saturating_sub(first), state.last)
    }
}

/// The pause before try number `tries` of a load, from 1.
pub(super) fn pause_before(tries: u32) -> Duration {
    (FIRST_RETRY * 2_u32.saturating_pow(tries.saturating_sub(1).min(16))).min(LONGEST_RETRY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_is_of_a_load_that_still_waits() {
        let (health, error) = (Health::default(), RemoteError::Full);
        let at = Duration::from_secs;
        health.begin_wait(error, at(1));
        health.begin_wait(error, at(3));
        assert_eq!(health.waiting(at(4)), (2, at(3), Some(error)));
        health.end_load(Some(at(1)), true);
        assert_eq!(health.waiting(at(4)), (1, at(1), Some(error)));
        health.end_load(Some(at(3)), true);
        assert_eq!(health.waiting(at(4)), (0, at(0), None));
    }
}
