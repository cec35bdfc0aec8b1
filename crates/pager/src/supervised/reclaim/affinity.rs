//! Keeps the governor and the reclaimer off the CPUs where programs fault.
//!
//! A thread that waits for its fault gives its CPU away for some microseconds. The handler takes it,
//! and then whoever is queued there, for a whole turn: many times what the fault took. Where CPUs
//! are to spare, the scheduler does not always see that, as a program that sleeps at each fault
//! looks as if it left its CPU half idle.

use crate::supervised::group::Group;
use crate::sync::lock;
use memfold_sys::thread;
use std::time::{Duration, Instant};

/// How often the CPUs are chosen anew.
const INTERVAL: Duration = Duration::from_millis(10);

/// Where one thread may run.
#[derive(Debug)]
pub struct AffinityFollower {
    /// All it is allowed to, in the order of the handlers.
    allowed: Vec<usize>,
    chosen: Vec<usize>,
    looked: Instant,
}

impl AffinityFollower {
    /// Of the calling thread.
    pub fn new() -> AffinityFollower {
        let allowed = thread::allowed_cpus();
        AffinityFollower {
            chosen: allowed.clone(),
            allowed,
            looked: Instant::now(),
        }
    }

    /// Moves the calling thread, which must be the one it was made for, to CPUs where no handler
    /// listens, if there are any. Where faults wait for room, the thread is what programs wait for,
    /// and may run anywhere.
    pub fn follow(&mut self, group: &Group) {
        if self.looked.elapsed() < INTERVAL {
            return;
        }
        self.looked = Instant::now();
        let chosen = self.choose(&handlers_at_work(group), !group.deferred.is_empty());
        if chosen != self.chosen {
            // Best effort: elsewhere it is a nuisance, not wrong.
            let _ = thread::run_on(&chosen);
            self.chosen = chosen;
        }
    }

    fn choose(&self, at_work: &[usize], is_waited_for: bool) -> Vec<usize> {
        let spare = |(number, _): &(usize, &usize)| !at_work.contains(number);
        let spare: Vec<usize> = self
            .allowed
            .iter()
            .enumerate()
            .filter(spare)
            .map(|(_, cpu)| *cpu)
            .collect();
        if is_waited_for || spare.is_empty() {
            return self.allowed.clone();
        }
        spare
    }
}

/// The numbers of the handlers that listen to programs.
fn handlers_at_work(group: &Group) -> Vec<usize> {
    let mut numbers = Vec::new();
    for space in group.spaces() {
        for number in lock(&space.listeners).listeners() {
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_kept_off_the_cpus_of_faults_while_others_are_to_spare() {
        let affinity = AffinityFollower {
            allowed: vec![2, 3, 8],
            chosen: vec![2, 3, 8],
            looked: Instant::now(),
        };
        assert_eq!(affinity.choose(&[], false), [2, 3, 8]);
        assert_eq!(affinity.choose(&[1], false), [2, 8]);
        assert_eq!(affinity.choose(&[2, 0], false), [3]);
        assert_eq!(affinity.choose(&[0, 1, 2], false), [2, 3, 8]);
        assert_eq!(affinity.choose(&[1], true), [2, 3, 8]);
    }
}
