//! Programs that are worth a helper and have none yet: from when on, and how often it is tried.

use std::time::{Duration, Instant};

/// The part of the room from which it is worth it at once, for all programs that are worth one. A larger divisor starts
/// helpers in more programs that end soon, such as compilers; a smaller one leaves more to do when the room gets less.
const PART_OF_ROOM: u64 = 16;
/// How long a program may be worth a helper before even a sleeping thread of it is sent to start one.
pub(crate) const LONG: Duration = Duration::from_secs(1);
/// Failures after which a program counts as one that has no helper for good. It is tried again all the same.
const TRIES: u32 = 5;
/// The wait after the first failure; it doubles with each one, up to the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(2)];

/// How much programs that have no helper need one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// Resident anonymous pages from which a program is worth one.
    pub worth: u64,
    pub is_little_room: bool,
    /// What the group may grow by before it is managed.
    pub room_pages: u64,
}

impl Need {
    /// The threshold, in resident pages, from which each of so many programs is worth a helper at once.
    pub(crate) fn worth_at_once(&self, programs: u64) -> u64 {
        self.room_pages / PART_OF_ROOM / programs.max(1)
    }
}

/// A program that is worth a helper, and has none.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub since: Instant,
    failures: u32,
    pub not_before: Instant,
}

impl Candidate {
    pub(crate) fn new(now: Instant) -> Candidate {
        Candidate {
            since: now,
            failures: 0,
            not_before: now,
        }
    }

    pub(crate) fn fail(&mut self, now: Instant) {
        let [first, longest] = PAUSES;
        let pause = first * (1 << self.failures.min(10));
        self.failures += 1;
        self.not_before = now + pause.min(longest);
    }

    /// Whether its failures are to be remembered.
    pub(crate) fn has_failures(&self) -> bool {
        self.failures > 0
    }

    /// Whether it was tried so often that it counts as one that has no helper for good.
    pub(crate) fn has_failed(&self) -> bool {
        self.failures >= TRIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_tried_again_after_growing_pauses() {
        let now = Instant::now();
        let mut candidate = Candidate::new(now);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            candidate.fail(now);
            pauses.push(candidate.not_before - now);
        }
        assert!(pauses.is_sorted() && pauses[0] == PAUSES[0] && pauses[11] == PAUSES[1]);
        assert!(candidate.has_failed());
    }
}
